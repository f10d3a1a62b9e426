"""Stage corpus: prompts with ids and sources, split so that no source is in two splits.

The standard library of the running interpreter, or the user's own prompts. What was dropped is counted by reason.
"""

import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data import sources, standard_library
from data.artifact import atomic, file_hash
from data.prompts import CorpusError
from data.splits import split, write_split
from pipeline.choices import Source, Text
from pipeline.context import Context
from pipeline.errors import PipelineError
from pipeline.tracking import Run

FORMAT = 1


def identity(context: Context) -> dict[str, Any]:
    config = context.config.corpus
    settings = asdict(config) | {"source": config.source.name}
    if config.response_column is None:
        del settings["response_column"]
    if config.source is Source.standard_library:
        origin = {"python": platform.python_version(), **({"code": True} if _with_code(context) else {})}
    else:
        origin = _files(config.path)
    return {"corpus": settings, "origin": origin, "seed": context.config.seed}


def _with_code(context: Context) -> bool:
    """Whether the library's own code goes with the requests to write it."""
    return context.config.regime.kind is Text.corpus


def _files(path: str | None) -> dict[str, str]:
    """Hashes of the user's files; a hub name stands for itself."""
    root = Path(path or "").expanduser()
    if root.is_file():
        return {root.name: file_hash(root)}
    return {str(p.relative_to(root)): file_hash(p) for p in sorted(root.rglob("*")) if p.is_file()} if root.is_dir() else {}


def run(context: Context, folder: Path, child: Run) -> tuple[dict[str, float], dict[str, Any]]:
    config = context.config.corpus
    try:
        if config.source is Source.standard_library:
            prompts, counts = standard_library.read(responses=_with_code(context))
        else:
            columns = {name: getattr(config, name) for name in ("column", "document_column", "response_column")}
            prompts, counts = sources.read(config.path or "", **columns)
        limits = {"train": config.train, "validation": config.validation, "test": config.test}
        corpus = split(prompts, limits=limits, seed=context.config.seed, counts=counts)
    except CorpusError as error:
        raise PipelineError(str(error)) from error
    for name, members in corpus.splits.items():
        with atomic(folder / f"{name}.parquet") as temporary:
            write_split(temporary, members)
    details = {
        "prompts": {name: len(members) for name, members in corpus.splits.items()},
        "counts": corpus.counts,
        "example": corpus.splits["train"][0].text,
    }
    return {f"corpus/{name}": len(members) for name, members in corpus.splits.items()}, details
