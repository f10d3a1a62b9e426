"""The benchmark of the link prints the figures of stores whose link is known, and sees predictions made afterwards."""

import contextlib
import json
import math
import time

import pytest

from pipeline import record, tracking
from pipeline.config import Tracking
from pipeline.page import measured
from tests.bench import link
from tests.pipeline.documents import document, rows

KEYS = ["drafts", "r2_speed", "median_abs_error_speed", "median_abs_error_acceptance", "best_predictor_of_speed"]
PREDICTED = {"0": [1.0, 1.5, 2.0], "1": [1.1, 1.2, 1.3]}
MEASURED = {"0": [1.1, 1.5, 1.9], "1": [1.1, 1.2, 1.3]}


def by_hand() -> list[dict]:
    """Three drafts. At 0: errors 0.1/1.1, 0, 0.1/1.9; squares 0.02 of a spread 0.4²+0+0.4² = 0.32. At 1: none.

    Kept: K = 2 and one token in ten rounds more than predicted at temperature 1, so 0.1 / 2; as predicted at 0.
    Speed has the order of top-1 at both temperatures, and of nothing else.
    """
    documents = []
    for place in range(3):
        made = document(0.5, drafts=2)
        for temperature, entry in made["by_temperature"].items():
            ratio = MEASURED[temperature][place]
            entry["predicted"], entry["ratio"] = PREDICTED[temperature][place], {"median": ratio, "low": ratio, "high": ratio}
            entry |= {"tokens_per_round_predicted": 1.5, "tokens_per_round": 1.5 if temperature == "0" else 1.6}
            entry["alignment"] = dict.fromkeys(entry["alignment"], (0.2, 0.9, 0.1)[place]) | {"top1": place / 10}
            entry["waterfall"] = dict(text=1.0, prefixes=1.0, positions=1.2, product=1.1, time=ratio)
        documents.append(made)
    return documents


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with a sweep of the three drafts and a job that failed; gives the folder and the sweep's run."""
    work = tmp_path_factory.mktemp("store")
    run = tracking.open_sweep(Tracking(), work, "sweep", "command", "token")
    for place, made in enumerate(by_hand()):
        with tracking.execution(Tracking(), work, f"job {place}", {}, "token") as job:
            job.tags({"overrides": f"trainer.max_steps={place}"})
            job.text(json.dumps(made), record.FILE)
            with job.child("speculate", {"stage": "speculate"}) as stage:
                stage.metrics({f"speed/ratio_predicted{end}": PREDICTED[t][place] for t, end in (("0", ""), ("1", "_at_1"))})
                time.sleep(0.01)
                stage.metrics({f"speed/ratio{end}": MEASURED[t][place] for t, end in (("0", ""), ("1", "_at_1"))})
    with contextlib.suppress(ValueError), tracking.execution(Tracking(), work, "job 3", {}, "token") as job:
        job.tags({"overrides": "trainer.max_steps=3"})
        raise ValueError("planted")
    return work, run


def printed(capsys, work, *arguments: str) -> list[str]:
    link.main([*arguments, "--work", str(work)])
    return capsys.readouterr().out.splitlines()


def test_the_last_line_has_the_figures_worked_by_hand(store, capsys):
    work, run = store
    lines = printed(capsys, work, run.run_id)
    found = json.loads(lines[-1])
    assert list(found) == KEYS
    assert found["drafts"] == 3
    assert found["r2_speed"] == pytest.approx(1 - 0.02 / 0.32)
    assert found["median_abs_error_speed"] == pytest.approx(0.1 / 1.9)
    assert found["median_abs_error_acceptance"] == pytest.approx(0.05)
    assert found["best_predictor_of_speed"] == "top1"
    assert printed(capsys, work, "last")[-1] == lines[-1]


def test_each_temperature_and_draft_has_its_own_line_and_a_miss_its_step(store, capsys):
    work, run = store
    lines = printed(capsys, work, run.run_id)
    assert lines[0].startswith("T=0: 3 drafts, R² of speed 0.93")  # 0.9375
    assert lines[0].endswith(", median error of speed 5.3%, of acceptance 0.000")
    assert "T=1: 3 drafts, R² of speed 1.000, median error of speed 0.0%, of acceptance 0.050" in lines
    assert "  #1 trainer.max_steps=0: predicted 1.00, measured 1.10 (+10.0%, furthest at positions (×1.20))" in lines
    assert "  #3 trainer.max_steps=2: predicted 2.00, measured 1.90 (-5.0%)" in lines
    [top1] = [line for line in lines[: lines.index(next(x for x in lines if x.startswith("T=1")))] if "top1" in line]
    assert "Spearman speed +1.00" in top1
    assert "predictions logged before decoding: 3 of 3 drafts, 0 after, 0 decoded by an earlier job" in lines


def test_a_draft_that_is_slower_than_predicted_is_blamed_on_a_step_that_loses():
    [draft] = measured(rows(1))
    entry = draft.document["by_temperature"]["0"]
    entry["predicted"], entry["ratio"]["median"] = 2.0, 1.0
    entry["waterfall"] = dict(text=2.0, prefixes=2.2, positions=2.1, product=1.4, time=1.0)
    miss, step = link.culprit(draft, "0")
    assert (miss, step) == (-0.5, "independence")  # ×1.1, ×0.95, ×0.67, ×0.71


@pytest.mark.parametrize("fault", ["together", "another value", "never"])
def test_a_prediction_that_was_not_made_before_is_seen(tmp_path, capsys, fault):
    made, run = by_hand()[0], tracking.open_sweep(Tracking(), tmp_path, "sweep", "command", "token")
    predicted = {"speed/ratio_predicted": 1.0, "speed/ratio_predicted_at_1": 1.1}
    with tracking.execution(Tracking(), tmp_path, "job", {}, "token") as job:
        job.text(json.dumps(made), record.FILE)
        with job.child("speculate", {"stage": "speculate"}) as stage:
            if fault == "another value":
                stage.metrics(predicted | {"speed/ratio_predicted": 1.05})
                time.sleep(0.01)
            stage.metrics({"speed/ratio": 1.1, "speed/ratio_at_1": 1.1} | (predicted if fault == "together" else {}))
    with pytest.raises(SystemExit) as stop:
        link.main([run.run_id, "--work", str(tmp_path)])
    assert stop.value.code == 1
    assert "0 of 1 drafts, 1 after" in capsys.readouterr().out


def test_a_job_that_took_the_result_of_another_is_counted_as_such(tmp_path, capsys):
    run = tracking.open_sweep(Tracking(), tmp_path, "sweep", "command", "token")
    with tracking.execution(Tracking(), tmp_path, "job", {}, "token") as job:
        job.text(json.dumps(by_hand()[0]), record.FILE)
    lines = printed(capsys, tmp_path, run.run_id)
    assert "predictions logged before decoding: 0 of 1 drafts, 0 after, 1 decoded by an earlier job" in lines
    found = json.loads(lines[-1])
    assert found["drafts"] == 1
    assert found["best_predictor_of_speed"] is None
    assert math.isnan(found["r2_speed"])


@pytest.mark.parametrize(("sweep", "words"), [("ffff", "no such run"), ("last", "no job of it was measured")])
def test_a_sweep_that_says_nothing_is_refused(tmp_path, sweep, words):
    tracking.open_sweep(Tracking(), tmp_path, "sweep", "command", "token")
    with pytest.raises(SystemExit, match=words):
        link.main([sweep, "--work", str(tmp_path)])


def test_many_drafts_as_real_ones_are_predicted_well():
    found = link.figures(measured(rows(25, failed=2)))
    assert found["drafts"] == 25
    assert 0.5 < found["r2_speed"] <= 1
    assert found["median_abs_error_speed"] < 0.07
