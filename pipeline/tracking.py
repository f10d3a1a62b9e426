"""MLflow, and the only file that knows it: one run for an execution, one nested run for each stage.

The store exists before any run begins. A run ends FINISHED on a clean exit only: FAILED on an exception, KILLED on an
interrupt, and a run whose process died without a word is marked KILLED by the next execution on the same machine.
"""

import logging
import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger
from mlflow.entities import Metric, Param, RunStatus, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from sqlalchemy.exc import SQLAlchemyError

from pipeline import interrupts
from pipeline.config import Tracking
from pipeline.errors import PipelineError

_PARAMS_IN_A_BATCH = 100  # MLflow's own limit
KIND = {"mlflow.experimentKind": "custom_model_development"}  # the page opens on runs and metrics, not on traces


class Run:
    """One MLflow run that is open."""

    def __init__(self, client: MlflowClient, uri: str, run_id: str, experiment: str) -> None:
        self.client, self.uri, self.run_id, self.experiment = client, uri, run_id, experiment

    def metrics(self, values: dict[str, float], step: int = 0) -> None:
        """Log finite values; MLflow's charts break on NaN, which here means "never happened"."""
        now = int(time.time() * 1000)
        batch = [Metric(name, float(value), now, step) for name, value in values.items() if math.isfinite(value)]
        self.client.log_batch(self.run_id, metrics=batch)

    def params(self, values: dict[str, Any]) -> None:
        items = [Param(key, str(value)) for key, value in values.items()]
        for first in range(0, len(items), _PARAMS_IN_A_BATCH):
            self.client.log_batch(self.run_id, params=items[first : first + _PARAMS_IN_A_BATCH])

    def tags(self, values: dict[str, str]) -> None:
        self.client.log_batch(self.run_id, tags=[RunTag(key, value) for key, value in values.items()])

    def table(self, columns: dict[str, list[Any]], name: str) -> None:
        self.client.log_table(self.run_id, columns, name)

    def file(self, path: Path) -> None:
        self.client.log_artifact(self.run_id, str(path))

    def text(self, text: str, name: str) -> None:
        self.client.log_text(self.run_id, text, name)

    def lightning_logger(self) -> MLFlowLogger:
        """A Lightning logger that writes into this very run."""
        return MLFlowLogger(experiment_name=self.experiment, tracking_uri=self.uri, run_id=self.run_id)

    @contextmanager
    def child(self, name: str, tags: dict[str, str]) -> Iterator["Run"]:
        """A nested run that ends with the block."""
        parent = self.client.get_run(self.run_id)
        run = self.client.create_run(
            parent.info.experiment_id, run_name=name, tags={**tags, **_owner(), "mlflow.parentRunId": self.run_id}
        )
        with _ending(Run(self.client, self.uri, run.info.run_id, self.experiment)) as child:
            yield child


def store_uri(tracking: Tracking, work: Path) -> str:
    """The tracking URI: the configured one, or an SQLite file under ``work``."""
    return tracking.uri or f"sqlite:///{(work / 'mlflow.db').resolve()}"


@contextmanager
def execution(tracking: Tracking, work: Path, name: str, tags: dict[str, str]) -> Iterator[Run]:
    """Open the run of this execution, creating store and experiment first.

    Raises:
        PipelineError: the store cannot be reached or was written by another MLflow.
    """
    for noisy in ("alembic", "mlflow", "sqlalchemy"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    uri = store_uri(tracking, work)
    try:
        client = MlflowClient(tracking_uri=uri)
        found = client.get_experiment_by_name(tracking.experiment)
        location = None if tracking.uri else (work / "mlartifacts").resolve().as_uri()
        number = found.experiment_id if found else client.create_experiment(tracking.experiment, location, KIND)
        if found and found.lifecycle_stage != "active":
            raise PipelineError(
                f"tracking.experiment={tracking.experiment}: this experiment was deleted; "
                "choose another name or run `mlflow gc`"
            )
        _bury_the_dead(client, number)
        run = client.create_run(number, run_name=name, tags={**tags, **_owner(), "mlflow.source.name": "draftsmith"})
    except (MlflowException, SQLAlchemyError) as error:
        raise PipelineError(f"tracking.uri={uri}: MLflow cannot use this store ({error})") from error
    with _ending(Run(client, uri, run.info.run_id, tracking.experiment)) as opened:
        yield opened


@contextmanager
def _ending(run: Run) -> Iterator[Run]:
    status = RunStatus.KILLED
    try:
        yield run
        status = RunStatus.FINISHED
    except Exception:
        status = RunStatus.KILLED if interrupts.received() else RunStatus.FAILED
        raise
    finally:
        run.client.set_terminated(run.run_id, RunStatus.to_string(status))


def _owner() -> dict[str, str]:
    return {"draftsmith.host": socket.gethostname(), "draftsmith.pid": str(os.getpid())}


def _bury_the_dead(client: MlflowClient, experiment: str) -> None:
    """Mark runs KILLED whose process on this machine is gone."""
    host = socket.gethostname()
    for run in client.search_runs([experiment], "attributes.status = 'RUNNING'"):
        pid = run.data.tags.get("draftsmith.pid", "")
        if run.data.tags.get("draftsmith.host") == host and pid.isdigit() and not _alive(int(pid)):
            client.set_terminated(run.info.run_id, RunStatus.to_string(RunStatus.KILLED))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
