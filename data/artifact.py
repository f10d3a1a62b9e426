"""Folders that are either whole or absent: identities, fingerprints, atomic writes.

A folder's identity is the nested dict of everything that shaped its content; its fingerprint is a hash of that. The
manifest is written last, so a folder without one is unfinished work that may be continued. It knows nothing of stages.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


def fingerprint(identity: Any) -> str:
    """16 hex digits that differ when anything in the JSON-able ``identity`` differs."""
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary neighbour of ``path``; it is synced and renamed to ``path`` if the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_partial(folder: Path) -> None:
    """Remove what a killed writer left below ``folder``; the caller holds its lock."""
    for left in folder.rglob(".*.partial"):
        left.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write pretty JSON atomically, keys in the given order."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def publish_folder(folder: Path, fill: Callable[[Path], None], replace: bool = False) -> None:
    """Fill a temporary neighbour of ``folder`` and rename it into place; ``folder`` must not exist unless ``replace``.

    All files are on the disk before the folder has its name, so a power cut leaves no empty ones in it. A folder that is
    replaced stays as it was until the new one is whole, and comes back if the renaming fails.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.replaced")
    temporary.mkdir(parents=True)
    try:
        fill(temporary)
        for path in (*temporary.rglob("*"), temporary):
            _sync(path)
        if replace and folder.exists():
            folder.rename(aside)
        temporary.rename(folder)
        _sync(folder.parent)
    except BaseException:
        if aside.exists() and not folder.exists():
            aside.rename(folder)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def folder_hash(folder: Path) -> str:
    """SHA-256 over the names and bytes of all files below ``folder``."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{file_hash(path)} {path.relative_to(folder).as_posix()}\n" for path in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def differences(wanted: Any, found: Any, prefix: str = "") -> list[str]:
    """Lines "key: found → wanted" for every leaf in which two identities differ."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        lines = []
        for key in sorted(wanted.keys() | found.keys()):
            lines += differences(wanted.get(key, "absent"), found.get(key, "absent"), f"{prefix}.{key}" if prefix else key)
        return lines
    return [] if wanted == found else [f"{prefix}: {found} → {wanted}"]
