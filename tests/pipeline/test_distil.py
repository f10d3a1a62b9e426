"""The stage distil as a whole: the target is loaded once, the best checkpoint is kept, training stops when nothing gains."""

import json
from collections import Counter

import pytest

from data.logit_cache import LogitCache
from data.responses import read_shards
from pipeline import outlook
from pipeline.coding import validation_kinds, validation_name
from pipeline.errors import PipelineError
from pipeline.module import CHOICE, Distillation
from pipeline.target import TargetFiles
from tests.pipeline.conftest import SMOKE, only
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


def test_validation_is_sliced_by_kinds_whose_mean_is_that_of_all(smoke):
    found = json.loads((only(smoke.work / "artifacts" / "distil") / "manifest.json").read_text())["details"]["validation"]
    written = [one for one in read_shards(only(smoke.work / "artifacts" / "generate")) if one.request.split == "validation"]
    for temperature in (0.0, 1.0):
        counts = Counter()
        for one in written:
            counts[one.request.kind] += len(one.tokens) * (one.request.temperature == temperature)
        slices = {kind: found[f"validation-{temperature:g}/overlap_kind_{kind}"] for kind in counts}
        mean = sum(slices[kind] * count for kind, count in counts.items()) / sum(counts.values())
        assert mean == pytest.approx(found[f"validation-{temperature:g}/overlap"], abs=1e-6)
        assert len(set(slices.values())) > 1


def test_the_kind_of_each_row_of_validation_text_is_that_of_the_response_it_holds(smoke):
    folder = only(smoke.work / "artifacts" / "logits")
    written = [one for one in read_shards(only(smoke.work / "artifacts" / "generate")) if one.tokens]
    kinds = {(*one.request.prompt, *one.tokens): one.request.kind for one in written}
    for temperature in (0.0, 1.0):
        cache = LogitCache(folder / validation_name(temperature), folder.name)
        found = validation_kinds(written, temperature, cache)
        assert found == [kinds[tuple(cache[row].tokens.tolist())] for row in range(len(cache))]
        assert len(set(found)) > 1
        fewer = [one for one in written if one.request.split != "validation" or one.request.kind != found[0]]
        with pytest.raises(PipelineError, match=r"does not hold the responses of generate; .*logits\.repair=true"):
            validation_kinds(fewer, temperature, cache)
