"""MLflow shows one run for the execution and one for each stage, and every run ends as what it was."""

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from pipeline import corpus, tracking
from pipeline.config import Tracking
from pipeline.described import run_name
from tests.pipeline.conftest import SMOKE, STAGES, begin, wait_for

HEADLINE = (
    "alignment/forward_kl",
    "alignment/overlap",
    "alignment/top1",
    "acceptance/rate",
    "acceptance/tokens_per_round",
    "speed/ratio",
    "speed/ratio_predicted",
    "break_even_overlap",
)


def runs_of(work: Path) -> tuple[MlflowClient, list[Run]]:
    """All runs of a store, the oldest first."""
    client = MlflowClient(f"sqlite:///{work / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("draftsmith")
    return client, client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])


def execution_and_stages(runs: list[Run]) -> tuple[Run, list[Run]]:
    """The newest execution and its nested runs."""
    execution = [run for run in runs if "mlflow.parentRunId" not in run.data.tags][-1]
    return execution, [run for run in runs if run.data.tags.get("mlflow.parentRunId") == execution.info.run_id]


@pytest.fixture(scope="module")
def stored(smoke):
    client, runs = runs_of(smoke.work)
    return client, *execution_and_stages(runs)


def test_one_run_for_the_execution_and_one_for_each_stage(smoke, stored):
    client, execution, stages = stored
    assert len(runs_of(smoke.work)[1]) == 1 + len(STAGES)
    assert sorted(run.info.run_name for run in stages) == sorted(STAGES)
    assert {run.info.status for run in [execution, *stages]} == {"FINISHED"}
    assert all(run.info.end_time >= run.info.start_time for run in [execution, *stages])
    for run in stages:
        folder = smoke.work / "artifacts" / run.info.run_name / run.data.tags["fingerprint"]
        assert run.data.tags["folder"] == str(folder)
        assert (folder / "manifest.json").is_file()
        assert "details.json" in {item.path for item in client.list_artifacts(run.info.run_id)}


@pytest.mark.parametrize("metric", HEADLINE)
def test_headline_metric_is_on_the_execution(stored, metric):
    _, execution, stages = stored
    values = [run.data.metrics[metric] for run in stages if metric in run.data.metrics]
    assert execution.data.metrics[metric] == values[0]
    assert len(values) == 1


def test_prediction_was_logged_before_anything_was_measured(stored):
    client, _, stages = stored
    [speculate] = [run.info.run_id for run in stages if run.info.run_name == "speculate"]
    for end in ("", "_at_1"):
        predicted = client.get_metric_history(speculate, f"speed/ratio_predicted{end}")
        measured = client.get_metric_history(speculate, f"speed/ratio{end}")
        assert min(m.timestamp for m in predicted) < min(m.timestamp for m in measured)
        assert len({m.value for m in predicted}) == 1


def test_training_curve_is_on_the_stage(stored):
    client, _, stages = stored
    [distil] = [run.info.run_id for run in stages if run.info.run_name == "distil"]
    steps = [m.step for m in client.get_metric_history(distil, "validation-1/overlap")]
    assert steps == sorted(set(steps)), "a point that training did not make"
    assert len(steps) == 3


def test_config_and_report_are_artifacts(stored):
    client, execution, _ = stored
    names = {item.path: item.file_size for item in client.list_artifacts(execution.info.run_id)}
    assert names.keys() >= {"config.yaml", "report.png", "report.md", "prompts.json"}
    assert all(names.values())
    assert execution.data.params["target.path"] == "random:tiny"
    assert execution.data.params["trainer.max_steps"] == "12"
    assert SMOKE in execution.data.tags["overrides"]


@pytest.mark.parametrize("override", ["draft.layers=[99]", "optimizer.learning_rate=1e30"])
def test_crash_ends_as_failed(work, attempt, override):
    code, stderr = attempt(SMOKE, override, work=work)
    assert code == 2, stderr
    execution, stages = execution_and_stages(runs_of(work)[1])
    assert execution.info.status == "FAILED"
    assert [(run.info.run_name, run.info.status) for run in stages] == [("distil", "FAILED")]


@pytest.mark.parametrize(
    "moment", [pytest.param("corpus", marks=pytest.mark.slow), pytest.param("generate", marks=pytest.mark.slow), "distil"]
)
def test_interrupt_ends_as_killed(work, tmp_path, moment):
    """Ctrl-C in our own code, in Lightning's prediction loop and in its training loop."""
    overrides = {
        "corpus": ["seed=5"],
        "generate": ["seed=0", "generate.batch_size=1", "generate.max_new_tokens=200"],
        "distil": ["trainer.max_steps=100000"],
    }[moment]
    file = {"generate": "generate/*/*.parquet", "distil": "distil/*/checkpoints/last.ckpt"}.get(moment, "")
    there = files(work, file)
    process = begin(SMOKE, *overrides, work=work, output=tmp_path / "said")
    wait_for(lambda: files(work, file) - there if file else running(work, moment), process)
    process.send_signal(signal.SIGINT)
    code = process.wait(60)
    said = (tmp_path / "said").read_text()
    assert "Traceback" not in said
    execution, stages = execution_and_stages(runs_of(work)[1])
    assert execution.info.status == "KILLED"
    assert [(run.info.run_name, run.info.status) for run in stages] == [(moment, "KILLED")]
    assert code == 130
    assert "draftsmith: interrupted; the same command continues" in said


def test_interrupt_that_native_code_turned_into_its_own_error_ends_as_killed(work, attempt, monkeypatch):
    def shuffled(*_):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as interrupt:
            raise ValueError("could not determine the shape") from interrupt

    monkeypatch.setattr(corpus, "run", shuffled)
    code, stderr = attempt(SMOKE, "seed=5", "stages=[corpus]", work=work)
    execution, stages = execution_and_stages(runs_of(work)[1])
    assert (code, execution.info.status, [run.info.status for run in stages]) == (130, "KILLED", ["KILLED"])
    assert "Traceback" not in stderr


def files(work: Path, pattern: str) -> set[Path]:
    return set((work / "artifacts").glob(pattern)) if pattern else set()


def running(work: Path, stage: str) -> bool:
    with contextlib.closing(sqlite3.connect(work / "mlflow.db")) as store:
        return bool(store.execute("SELECT 1 FROM runs WHERE name = ? AND status = 'RUNNING'", (stage,)).fetchall())


def test_run_whose_process_is_gone_is_marked_killed(work):
    with tracking.execution(Tracking(), work, "first", {}) as first:
        client = first.client
    experiment = client.get_run(first.run_id).info.experiment_id
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = socket.gethostname()
    owners = {"gone": (here, gone.pid), "alive": (here, os.getppid()), "elsewhere": ("another-host", gone.pid)}
    runs = {
        name: client.create_run(experiment, tags={"draftsmith.host": host, "draftsmith.pid": str(pid)}).info.run_id
        for name, (host, pid) in owners.items()
    }
    stranger = client.create_run(experiment).info.run_id
    with tracking.execution(Tracking(), work, "next", {}) as run:
        assert client.get_run(run.run_id).info.status == "RUNNING"
    status = {name: client.get_run(run_id).info.status for name, run_id in runs.items()}
    assert status == {"gone": "KILLED", "alive": "RUNNING", "elsewhere": "RUNNING"}
    assert client.get_run(stranger).info.status == "RUNNING"
    assert client.get_run(run.run_id).info.status == "FINISHED"
    assert client.get_run(first.run_id).info.status == "FINISHED"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "default"),
        (["paths.work=/a", "stages=[corpus]", "tracking.uri=x"], "default"),
        (["+experiment=smoke", "seed=1", "paths.work=/a"], "seed=1 experiment=smoke"),
        (["a=" + "b" * 300], "a=" + "b" * 198),
    ],
)
def test_a_run_is_named_by_what_sets_it_apart(overrides, name):
    assert run_name(overrides) == name
