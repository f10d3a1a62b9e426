"""The stage distil as a whole: the target is loaded once, the best checkpoint is kept, training stops when nothing gains."""

import json

import pytest

from pipeline import outlook
from pipeline.module import CHOICE, Distillation
from pipeline.target import TargetFiles
from tests.pipeline.conftest import SMOKE
from tests.pipeline.test_tracking import runs_of


def details_of(work, run_id: str) -> dict:
    [found] = [
        manifest
        for path in (work / "artifacts" / "distil").glob("*/manifest.json")
        if (manifest := json.loads(path.read_text()))["run_id"] == run_id
    ]
    return found["details"]


def last_run(work):
    client, stored = runs_of(work)
    run = [run for run in stored if run.info.run_name == "distil"][-1]
    return run.info.run_id, client.get_metric_history(run.info.run_id, CHOICE)


def test_the_checkpoint_that_promises_most_is_kept_after_a_table_and_one_load(work, attempt, monkeypatch):
    events, load, show, step = [], TargetFiles.load, outlook.show, Distillation.training_step
    monkeypatch.setattr(TargetFiles, "load", lambda self, dtype: events.append("load") or load(self, dtype))
    monkeypatch.setattr(outlook, "show", lambda expected: events.append("table") or show(expected))
    monkeypatch.setattr(Distillation, "training_step", lambda self, *given: events.append("step") or step(self, *given))
    code, stderr = attempt(SMOKE, "stages=[distil]", "trainer.validate_every=3", "seed=0", work=work)
    assert code == 0, stderr
    assert events == ["load", "table", *["step"] * 12]
    run_id, history = last_run(work)
    assert [point.step for point in history] == [2, 5, 8, 11]  # counted from 0
    best = max(history, key=lambda point: point.value)
    details = details_of(work, run_id)
    assert details["best_step"] == best.step + 1
    assert details["validation"][CHOICE] == pytest.approx(best.value)
    assert details["draft/validation_overlap"] == details["validation"]["validation-1/overlap"]
    assert details["epochs"] == pytest.approx(12 * 8 / 48)


def test_training_stops_when_validation_gains_nothing(work, attempt):
    rates = ("optimizer.learning_rate=1e-12", "optimizer.muon_learning_rate=1e-12")
    code, stderr = attempt(SMOKE, "stages=[distil]", *rates, "trainer.validate_every=2", "trainer.patience=2", work=work)
    assert code == 0, stderr
    run_id, history = last_run(work)
    assert [point.step for point in history] == [1, 3, 5]
    assert details_of(work, run_id)["epochs"] == pytest.approx(6 * 8 / 48)
