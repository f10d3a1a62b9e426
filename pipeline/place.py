"""Where an export goes: the folder of the user's choice or the stage's own, and whose export lies there already.

A folder appears whole by a rename, or not at all. What is in it and how it is proven is not known here.
"""

import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from data.artifact import publish_folder
from pipeline.choices import Stage
from pipeline.context import Context
from pipeline.errors import PipelineError

PROVENANCE = "provenance.json"

log = logging.getLogger("draftsmith")


def destination(context: Context, folder: Path) -> Path:
    path = context.config.export.path
    return Path(path).expanduser().resolve() if path is not None else folder / "draft"


def holds(place: Path, result: str, draft: str | None) -> bool:
    """Whether ``place`` has the export with the fingerprint ``result``, of the draft whose files hash to ``draft`` (None: any).

    Several results can be exported to one place, each replacing the one before; the provenance says whose turn it was.
    """
    try:
        found = json.loads((place / PROVENANCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    same = found.get("stages", {}).get(Stage.export.name) == result
    return same and draft in (None, found.get("draft_sha256"))


def reserve(context: Context, place: Path, result: str, draft: str | None) -> None:
    """Refuse a place of the user's choice that is taken or cannot be written.

    Raises:
        PipelineError: naming export.path, and what to do.
    """
    if context.config.export.path is None:
        return
    _check(context, place, result, draft)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place.parent):
            pass
    except OSError as error:
        raise _unwritable(context, error) from error


def publish(context: Context, folder: Path, write: Callable[[Path], None], prove: Callable[[Path], None]) -> Path:
    """Let the destination appear as ``write`` made it and ``prove`` found it.

    A run that ended between this and its manifest left this very export there: it is proven again and kept.
    """
    where, draft = destination(context, folder), context.parent(Stage.speculate).draft
    if holds(where, folder.name, draft) and not context.config.export.overwrite:
        log.info("export: an interrupted run left this export at its place, it is proven again and kept")
        try:
            prove(where)
        except PipelineError as error:
            raise PipelineError(f"{error}; an interrupted run left them, export.overwrite=true writes them again") from error
        return where
    _check(context, where, folder.name, draft)

    def fill(temporary: Path) -> None:
        write(temporary)
        prove(temporary)

    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        publish_folder(where, fill, replace=where.exists())
    except (OSError, SafetensorError) as error:
        raise _unwritable(context, error) from error
    return where


def _check(context: Context, place: Path, result: str, draft: str | None) -> None:
    """Refuse a destination that is taken, which is not ours to replace unless it is an export and the user says so."""
    export = context.config.export
    if export.path is None or not (place.exists() or place.is_symlink()):
        return
    if not export.overwrite:
        if holds(place, result, draft):
            return
        raise PipelineError(
            f"export.path={export.path}: this folder exists; move it away, choose another, or give export.overwrite=true"
        )
    if not (place / PROVENANCE).is_file():
        raise PipelineError(
            f"export.path={export.path}: export.overwrite replaces earlier exports only, this is none; choose another folder"
        )


def _unwritable(context: Context, error: Exception) -> PipelineError:
    path = context.config.export.path
    key = "paths.work" if path is None else f"export.path={path}"
    reason = getattr(error, "strerror", None) or str(error)
    return PipelineError(f"{key}: the export cannot be written there ({reason}); free some space or choose another folder")
