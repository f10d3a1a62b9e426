"""MLflow builds an SQLite store by seventy migrations, four seconds of work; tests get copies of one that was built so.

The smoke run and the processes of ``start`` build theirs by themselves.
"""

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest
from filelock import FileLock
from mlflow.store.db import utils
from mlflow.tracking import MlflowClient

_BUILD = "_initialize_tables"  # of an SQLAlchemy engine; MLflow calls it for a store that is empty


def built(root: Path) -> Path:
    """A new store below ``root``, built once whichever worker asks first."""
    place = root / "store" / "mlflow.db"
    with FileLock(root / "store.lock"):
        if not place.is_file():
            making = place.with_name("making")
            making.mkdir(parents=True)
            MlflowClient(f"sqlite:///{making / place.name}")
            (making / place.name).rename(place)
    return place


def copied(patch: pytest.MonkeyPatch, store: Path) -> None:
    """Let MLflow copy ``store`` where it would build a new one."""

    def fill(engine) -> None:
        with contextlib.closing(sqlite3.connect(store)) as source, contextlib.closing(engine.raw_connection()) as place:
            source.backup(place.driver_connection)

    patch.setattr(utils, _BUILD, fill, raising=False)


def place(store: Path, work: Path) -> Path:
    """A work folder with a copy of ``store``, for a process that is not this one."""
    work.mkdir(parents=True)
    shutil.copyfile(store, work / "mlflow.db")
    return work
