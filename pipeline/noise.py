"""What libraries say unasked, switched off: adverts, warnings about themselves, progress bars inside ours."""

import logging
import warnings

import datasets
import transformers


def quieten() -> None:
    """Leave one logging handler and our own progress bars."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=".*(LeafSpec|num_workers|treespec).*")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.logging.set_verbosity(logging.CRITICAL)  # what it cannot read becomes our message
    datasets.disable_progress_bars()
    for name in ("lightning.pytorch", "lightning.fabric", "lightning", "gguf"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.WARNING)
        logger.handlers.clear()
