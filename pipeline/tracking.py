"""MLflow, and the only file that knows it: a run for a sweep, one for each execution, a nested one for each stage.

The store exists before any run begins. A run ends FINISHED on a clean exit only: FAILED on an exception, KILLED on an
interrupt, and a run whose process died without a word is marked KILLED by the next execution on the same machine.
"""

import json
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlflow
from filelock import FileLock
from lightning.pytorch.loggers import MLFlowLogger
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModelInput,
    LoggedModelOutput,
    LoggedModelStatus,
    Metric,
    Param,
    RunStatus,
    RunTag,
)
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH
from sqlalchemy.exc import SQLAlchemyError

from pipeline import executions, faults, interrupts, owner, server
from pipeline.config import Tracking
from pipeline.errors import PipelineError
from pipeline.executions import Failure, Record
from pipeline.lineage import Data, Model

_PARAMS_IN_A_BATCH = 100  # MLflow's own limit
_LONGEST_TAG = 5000  # characters; MLflow takes 8,000 bytes
_MIGRATIONS = Path(mlflow.__file__).parent / "store" / "db_migrations" / "versions"
KIND = {"mlflow.experimentKind": "custom_model_development"}  # the page opens on runs and metrics, not on traces


class Run:
    """One MLflow run that is open."""

    def __init__(self, client: MlflowClient, uri: str, run_id: str, experiment: str) -> None:
        self.client, self.uri, self.run_id, self.experiment = client, uri, run_id, experiment
        self._undefined: set[str] = set()

    def metrics(self, values: dict[str, float], step: int = 0, about: Model | None = None) -> None:
        """Log finite values, of the model that they are ``about`` too.

        MLflow's charts break on NaN, which here means "never happened": a tag names such metrics.
        """
        now, finite = int(time.time() * 1000), {name: float(value) for name, value in values.items() if math.isfinite(value)}
        model = None if about is None else self._model(about)
        batch = [Metric(name, value, now, step, model) for name, value in finite.items()]
        self.client.log_batch(self.run_id, metrics=batch)
        undefined = values.keys() - finite.keys()
        if undefined - self._undefined:
            self._undefined |= undefined
            self.tags({"metrics_undefined": " ".join(sorted(self._undefined))})

    def params(self, values: dict[str, Any]) -> None:
        """Log values; one that MLflow would cut is an artifact, and the param says which."""
        items = []
        for key, value in values.items():
            text, name = str(value), f"params/{key}.txt"
            if len(text) > MAX_PARAM_VAL_LENGTH:
                self.text(text, name)
            items.append(Param(key, faults.excerpt(text, MAX_PARAM_VAL_LENGTH, f", whole in {name}")))
        for first in range(0, len(items), _PARAMS_IN_A_BATCH):
            self.client.log_batch(self.run_id, params=items[first : first + _PARAMS_IN_A_BATCH])

    def tags(self, values: dict[str, str]) -> None:
        tags = [RunTag(key, faults.excerpt(value, _LONGEST_TAG)) for key, value in values.items()]
        self.client.log_batch(self.run_id, tags=tags)

    def reads(self, data: list[Data], models: list[Model]) -> None:
        """Put down what this run reads."""
        if not (data or models):
            return
        sets = [
            DatasetInput(
                Dataset(one.name, one.digest, "local", json.dumps({"uri": one.folder}), profile=json.dumps(one.profile)),
                [InputTag("mlflow.data.context", one.purpose)],
            )
            for one in data
        ]
        self.client.log_inputs(self.run_id, sets, [LoggedModelInput(self._model(model)) for model in models])

    def makes(self, models: list[Model]) -> None:
        """Put down which models are results of this run."""
        if models:
            self.client.log_outputs(self.run_id, [LoggedModelOutput(self._model(one, self.run_id), 0) for one in models])

    def _model(self, model: Model, maker: str | None = None) -> str:
        """The id of a model in this store, which has each but once, whoever speaks of it first."""
        number = self.client.get_run(self.run_id).info.experiment_id
        if found := self.client.search_logged_models([number], f"name = '{model.name}'", max_results=1):
            return found[0].model_id
        made = self.client.create_logged_model(number, model.name, maker, model.tags, model.params, model.kind)
        return self.client.finalize_logged_model(made.model_id, LoggedModelStatus.READY).model_id

    def table(self, columns: dict[str, list[Any]], name: str) -> None:
        with self._writing():
            self.client.log_table(self.run_id, columns, name)

    def file(self, path: Path) -> None:
        with self._writing():
            self.client.log_artifact(self.run_id, str(path))

    def folder(self, path: Path, name: str) -> None:
        with self._writing():
            self.client.log_artifacts(self.run_id, str(path), name)

    def text(self, text: str, name: str) -> None:
        with self._writing():
            self.client.log_text(self.run_id, text, name)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, MlflowException) as error:
            if message := faults.unwritable(self.uri, error):
                raise PipelineError(message) from error
            raise

    def lightning_logger(self) -> MLFlowLogger:
        """A Lightning logger that writes into this very run."""
        return MLFlowLogger(experiment_name=self.experiment, tracking_uri=self.uri, run_id=self.run_id)

    def curves(self, run_id: str | None, names: tuple[str, ...]) -> dict[str, list[tuple[int, float]]]:
        """Histories (step, value) of the metrics whose last part is in ``names``; nothing if the run is not in this store."""
        try:
            logged = self.client.get_run(run_id or "").data.metrics
        except MlflowException:  # the result was computed under another store
            return {}
        wanted = [name for name in sorted(logged) if name.rpartition("/")[2] in names]
        return {name: [(m.step, m.value) for m in self.client.get_metric_history(run_id, name)] for name in wanted}

    def name(self) -> str:
        return self.client.get_run(self.run_id).info.run_name

    def end(self, status: str) -> None:
        self.client.set_terminated(self.run_id, status)

    def remove(self) -> None:
        self.client.delete_run(self.run_id)

    def children(self) -> list[Any]:
        """The MLflow runs right below this one, the newest first."""
        return list(executions.below(self.client, self.run_id))

    def last_attempts(self) -> list[Any]:
        """The newest MLflow run of each job of this sweep, the oldest first."""
        return executions.last_attempts(self.children())

    def failures(self) -> list[Failure]:
        """The executions below this sweep whose last attempt failed, the oldest first."""
        return executions.failures(self.last_attempts())

    @contextmanager
    def child(self, name: str, tags: dict[str, str]) -> Iterator["Run"]:
        """A nested run that ends with the block."""
        parent = self.client.get_run(self.run_id)
        run = self.client.create_run(
            parent.info.experiment_id, run_name=name, tags={**tags, **owner.tags(), "mlflow.parentRunId": self.run_id}
        )
        with _ending(Run(self.client, self.uri, run.info.run_id, self.experiment)) as child:
            yield child


def store_uri(tracking: Tracking, work: Path) -> str:
    """The tracking URI: the configured one, or an SQLite file under ``work``."""
    return tracking.uri or f"sqlite:///{(work / 'mlflow.db').resolve()}"


@contextmanager
def execution(tracking: Tracking, work: Path, name: str, tags: dict[str, str], sweep: str | None = None) -> Iterator[Run]:
    """Open the run of this execution, creating store and experiment first; ``sweep`` is the token of the sweep it is of.

    Raises:
        PipelineError: the store cannot be reached, was written by another MLflow, or does not hold the sweep.
    """
    with _store(tracking, work) as (client, number):
        above = {} if sweep is None else {"mlflow.parentRunId": _swept(client, number, sweep)}
        run = client.create_run(
            number, run_name=name, tags={**tags, **owner.tags(), **above, "mlflow.source.name": "draftsmith"}
        )
    with _ending(Run(client, store_uri(tracking, work), run.info.run_id, tracking.experiment)) as opened:
        yield opened


def open_sweep(tracking: Tracking, work: Path, name: str, command: str, token: str) -> Run:
    """The run of a sweep: that of an earlier execution of the same ``command`` if it is not at work, else a new one.

    Raises:
        PipelineError: the store cannot be reached or was written by another MLflow.
    """
    tags = {"draftsmith.sweep": command, "draftsmith.token": token, **owner.tags(), "mlflow.source.name": "draftsmith"}
    with _store(tracking, work) as (client, number):
        if client.search_runs([number], f"tags.`draftsmith.token` = '{token}' and attributes.status = 'RUNNING'"):
            raise PipelineError("hydra.sweep.dir: another sweep is at work in this folder; give each its own")
        earlier = client.search_runs([number], f"tags.`draftsmith.sweep` = '{command}' and attributes.status != 'RUNNING'")
        if earlier:
            run = Run(client, store_uri(tracking, work), earlier[0].info.run_id, tracking.experiment)
            client.update_run(run.run_id, status=RunStatus.to_string(RunStatus.RUNNING))
            run.tags(tags)
            return run
        created = client.create_run(number, run_name=name, tags=tags)
        return Run(client, store_uri(tracking, work), created.info.run_id, tracking.experiment)


def finished(tracking: Tracking, work: Path, sweep: str, results: str) -> dict[str, float] | None:
    """Metrics of the finished execution with these ``results`` below the sweep with this token; None if there is none."""
    with _store(tracking, work) as (client, number):
        wanted = f"tags.`mlflow.parentRunId` = '{_swept(client, number, sweep)}' and tags.`draftsmith.results` = '{results}'"
        found = client.search_runs([number], f"{wanted} and attributes.status = 'FINISHED'")
    return found[0].data.metrics if found else None


def read(tracking: Tracking, work: Path, wanted: str, document: str) -> tuple[Run, list[Record]]:
    """The sweep or execution whose id begins with ``wanted`` (``last``: the newest), and its jobs or itself alone.

    Args:
        document: name of the JSON artifact that goes into the records.

    Raises:
        PipelineError: the store cannot be used, or has no such run, or has several.
    """
    uri = store_uri(tracking, work)
    with _store(tracking, work) as (client, number):
        tops = [r for r in client.search_runs([number], max_results=50_000) if "mlflow.parentRunId" not in r.data.tags]
        found = tops[:1] if wanted == "last" else [run for run in tops if run.info.run_id.startswith(wanted)]
        if len(found) != 1:
            names = "".join(f"\n  {run.info.run_id}  {run.info.status:<9} {run.info.run_name[:80]}" for run in tops[:20])
            many = f"{len(found)} runs begin so" if found else f"no such run in {uri}"
            raise PipelineError(f"{wanted}: {many}; give the id of a sweep or an execution, or `last`{names}")
        run = Run(client, uri, found[0].info.run_id, tracking.experiment)
        jobs = run.last_attempts() if "draftsmith.sweep" in found[0].data.tags else found
        return run, [executions.record(client, job, document) for job in jobs]


@contextmanager
def _store(tracking: Tracking, work: Path) -> Iterator[tuple[MlflowClient, str]]:
    """A client and the experiment's number, with errors as messages; one process at a time creates, adopts and buries."""
    for noisy in ("alembic", "mlflow", "sqlalchemy"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    uri = store_uri(tracking, work)
    server.demand(uri)
    try:
        with FileLock(work / "mlflow.lock"):
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
            yield client, number
    except (MlflowException, SQLAlchemyError) as error:
        raise PipelineError(faults.unusable(uri, error, _MIGRATIONS, mlflow.__version__)) from error


def _swept(client: MlflowClient, number: str, token: str) -> str:
    found = client.search_runs([number], f"tags.`draftsmith.token` = '{token}'")
    if not found:
        raise PipelineError("paths.work, tracking: the jobs of a sweep share one folder and one store; do not sweep over them")
    return found[0].info.run_id


@contextmanager
def _ending(run: Run) -> Iterator[Run]:
    status = RunStatus.KILLED
    try:
        yield run
        status = RunStatus.FINISHED
    except Exception as error:
        status = RunStatus.KILLED if interrupts.received() else RunStatus.FAILED
        run.tags({"error": str(error), "error_type": type(error).__name__})
        raise
    finally:
        run.end(RunStatus.to_string(status))


def _bury_the_dead(client: MlflowClient, experiment: str) -> None:
    """Mark runs KILLED whose process on this machine is gone."""
    for run in client.search_runs([experiment], "attributes.status = 'RUNNING'"):
        if owner.gone(run.data.tags):
            client.set_terminated(run.info.run_id, RunStatus.to_string(RunStatus.KILLED))
