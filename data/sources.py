"""The user's own prompts: JSONL, JSON, Parquet, CSV or text files, a folder of them, or a Hugging Face dataset name.

Everything is read by ``datasets.load_dataset`` with its own readers; code that a dataset may bring is never run. Rows
belong to the document that ``document_column`` names, or each to itself. It knows nothing of splits to be made.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetsError

from data.prompts import CorpusError, Prompt, prompt

KIND = "user"

_READERS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
}
_FIX = "give a JSONL, Parquet or text file, a folder of them, or a Hugging Face dataset name"


def read(
    path: str,
    *,
    column: str = "prompt",
    document_column: str | None = None,
    response_column: str | None = None,
    split: str = "train",
) -> tuple[list[Prompt], dict[str, int]]:
    """All prompts of a file, folder or dataset, in the order of files and rows, and counts of prompts.

    Args:
        path: file, folder or Hugging Face dataset name.
        column: column that holds the prompt; a list of chat turns counts as its first user turn. A text file has no
            columns: each line is a prompt.
        document_column: column that says which rows belong together; None, or a null in a row, makes the row its own.
        response_column: column that holds the answer, for prompts that come with one; of a list of chat turns the
            first of the assistant.
        split: split of a Hugging Face dataset; files have none.
    """
    prompts: list[Prompt] = []
    counts: Counter[str] = Counter(read=0, kept=0)
    for name, is_text, table in _tables(path, split):
        key = "text" if is_text else column
        wanted = {"corpus.column": key, "corpus.document_column": document_column, "corpus.response_column": response_column}
        for setting, value in wanted.items():
            if value is not None and value not in table.column_names:
                where = f"{setting}={value} is not a column of {name} (corpus.path={path})"
                raise CorpusError(f"{where}; its columns are {', '.join(table.column_names)}")
        columns = [value for value in dict.fromkeys(wanted.values()) if value is not None]
        for number, row in enumerate(table.select_columns(columns), start=1):
            counts["read"] += 1
            text = first_turn(row[key])
            if text is None or not text.strip():
                counts["dropped/empty" if row[key] is None or text is not None else "dropped/not_text"] += 1
                continue
            document = row[document_column] if document_column else None
            source = f"{name}:{number}" if document is None else str(document)
            answer = first_turn(row[response_column], "assistant") if response_column else None
            prompts.append(prompt(source, KIND, text.strip(), (answer or "").strip() or None))
    if not prompts:
        raise CorpusError(
            f"corpus.column={column} holds no text in the {counts['read']} rows of corpus.path={path}; "
            "name the column that holds the prompts"
        )
    counts["kept"] = len(prompts)
    return prompts, dict(counts)


def first_turn(value: Any, role: str = "user") -> str | None:
    """A string, the first of a list of strings, or what the first message of a list says in a ``role``."""
    if isinstance(value, list):
        messages = [turn for turn in value if isinstance(turn, dict)]
        if messages:
            value = next((turn.get("content") for turn in messages if turn.get("role") == role), None)
        else:
            value = value[0] if value else ""
    return value if isinstance(value, str) else None


def _tables(path: str, split: str) -> Iterator[tuple[str, bool, Dataset]]:
    """Each table with the name that its rows go by, and whether it is plain text."""
    if not path:  # Path("") would be the working directory
        raise CorpusError(f"corpus.path is empty; {_FIX}")
    place = Path(path).expanduser()
    if place.is_dir():
        files = [f for f in sorted(place.rglob("*")) if f.suffix.lower() in _READERS and f.is_file()]
        files = [f for f in files if not any(part.startswith(".") for part in f.relative_to(place).parts)]
        if not files:
            raise CorpusError(f"corpus.path={path} holds no file ending in {', '.join(_READERS)}; {_FIX}")
        for file in files:
            yield _file(file, file.relative_to(place).as_posix(), path)
    elif place.is_file():
        if place.suffix.lower() not in _READERS:
            raise CorpusError(f"corpus.path={path} does not end in one of {', '.join(_READERS)}; {_FIX}")
        yield _file(place, place.name, path)
    elif place.suffix.lower() in _READERS or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path):
        raise CorpusError(f"corpus.path={path} does not exist; {_FIX}")
    else:
        try:
            yield path, False, load_dataset(path, split=split)
        except (DatasetsError, OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise CorpusError(
                f"corpus.path={path} is no file here and does not load as a Hugging Face dataset ({reason}); {_FIX}"
            ) from error


def _file(file: Path, name: str, path: str) -> tuple[str, bool, Dataset]:
    reader = _READERS[file.suffix.lower()]
    if file.stat().st_size == 0:
        raise CorpusError(f"corpus.path={path}: {name} is empty; {_FIX}")
    # A cache of its own: nothing is left behind, and no stale copy of a changed file is met.
    with TemporaryDirectory(prefix="draftsmith-corpus-") as cache:
        try:
            # Globs in a file's own name would otherwise be expanded.
            escaped = re.sub(r"([*?\[])", r"[\1]", str(file.resolve()))
            table = load_dataset(reader, data_files={"train": [escaped]}, split="train", cache_dir=cache, keep_in_memory=True)
        except (DatasetsError, OSError, ValueError) as error:
            reason = str(error.__cause__ or error).strip().partition("\n")[0]
            raise CorpusError(
                f"corpus.path={path}: {name} cannot be read as {reader} ({reason}); mend the file or {_FIX}"
            ) from error
    return name, reader == "text", table
