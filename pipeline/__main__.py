"""``python -m pipeline`` is the console script ``draftsmith``."""

from pipeline.main import main

if __name__ == "__main__":
    main()
