"""A run that is killed without warning goes on where it stood, and ends with the bytes of a run that was left alone."""

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.pipeline.conftest import SMOKE, begin, copy_work, digest, forked, only
from tests.pipeline.conftest import wait_for as wait
from tests.pipeline.stores import place
from tests.pipeline.test_tracking import runs_of

STAGES = ("corpus", "generate", "logits", "distil")
FIRST = {"generate": "*/shard-*.parquet", "logits": "*/train/shard-*.safetensors", "distil": "*/checkpoints/last.ckpt"}


@dataclass(frozen=True)
class Killed:
    """A run killed in one stage: what the stage had finished by then (mtime by path), and its last checkpoint's step."""

    finished: dict[Path, int]
    step: int


@pytest.fixture(scope="module")
def settings(prompts) -> list[str]:
    return [
        SMOKE,
        f"stages=[{','.join(STAGES)}]",
        "corpus=dataset",
        f"corpus.path={prompts}",
        "generate.batch_size=2",
        "codec.batch_size=2",
        "trainer.max_steps=40",
        "trainer.validate_every=2",
    ]


@pytest.fixture(scope="module")
def runs(settings, store, tmp_path_factory) -> tuple[Path, Path, dict[str, Killed], str]:
    """The folder of an undisturbed run, of one killed in three stages, what each kill left, and what the last run said."""
    root = tmp_path_factory.mktemp("resume")
    calm, killed = (place(store, root / name) for name in ("calm", "killed"))
    undisturbed = begin(*settings, work=calm, output=root / "calm.txt")
    left = {}
    try:
        for stage, pattern in FIRST.items():
            process = begin(*settings, work=killed, output=root / f"{stage}.txt")
            folder = killed / "artifacts" / stage
            wait(lambda: len(list(folder.glob(pattern))) >= (1 if stage == "distil" else 3), process)  # noqa: B023
            os.killpg(process.pid, signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            assert not list(folder.glob("*/manifest.json")), f"{stage} ended before it was killed"
            finished = {path: path.stat().st_mtime_ns for path in folder.glob(pattern)}
            step = torch.load(next(iter(finished)), weights_only=True)["global_step"] if stage == "distil" else 0
            left[stage] = Killed(finished, step)
        _, stdout, stderr, code = forked(*settings, work=killed)
        assert code == 0, stderr
        assert undisturbed.wait(120) == 0, (root / "calm.txt").read_text()
    finally:
        if undisturbed.poll() is None:
            os.killpg(undisturbed.pid, signal.SIGKILL)
    return calm, killed, left, stdout


def test_the_last_run_only_did_what_was_left(runs):
    *_, stdout = runs
    assert re.findall(r"(\w+): nothing has changed, skipped", stdout) == ["corpus", "generate", "logits"]
    assert re.findall(r"(\w+): begins", stdout) == ["distil"]


@pytest.mark.parametrize("stage", ["generate", "logits"])
def test_finished_shards_are_kept_and_the_rest_has_the_same_bytes(runs, stage):
    calm, killed, left, _ = runs
    assert {path: path.stat().st_mtime_ns for path in left[stage].finished} == left[stage].finished
    ours, theirs = (digest(only(work / "artifacts" / stage)) for work in (killed, calm))
    for shards in (ours, theirs):
        shards.pop("manifest.json")  # it holds rates
    assert ours == theirs
    assert 0 < len(left[stage].finished) < len(theirs)
    assert len({only(work / "artifacts" / stage).name for work in (killed, calm)}) == 1


def test_training_goes_on_after_the_last_checkpoint_and_gives_the_same_draft(runs):
    calm, killed, left, _ = runs
    assert 0 < left["distil"].step < 40
    client, stored = runs_of(killed)
    resumed = [run for run in stored if run.info.run_name == "distil"][-1]
    steps = [m.step for m in client.get_metric_history(resumed.info.run_id, "validation-1/top1")]
    assert min(steps) >= left["distil"].step
    ours, theirs = (digest(only(work / "artifacts" / "distil") / "draft") for work in (killed, calm))
    assert "draft.safetensors" in ours
    assert ours == theirs


def test_killed_runs_are_marked_by_the_next(runs):
    calm, killed, *_ = runs
    executions = [run.info.status for run in runs_of(killed)[1] if "mlflow.parentRunId" not in run.data.tags]
    assert executions == ["KILLED", "KILLED", "KILLED", "FINISHED"]
    stages = [(run.info.run_name, run.info.status) for run in runs_of(killed)[1] if "mlflow.parentRunId" in run.data.tags]
    assert [name for name, status in stages if status == "KILLED"] == ["generate", "logits", "distil"]
    assert {run.info.status for run in runs_of(calm)[1]} == {"FINISHED"}


def test_remains_of_a_killed_write_are_not_read(runs, settings, tmp_path, attempt):
    calm, *_ = runs
    work = copy_work(calm, tmp_path / "work")
    generated = only(work / "artifacts" / "generate")
    before = digest(generated)
    (generated / "manifest.json").unlink()
    (generated / "shard-00001.parquet").unlink()
    (generated / ".shard-00001.parquet.1.partial").write_bytes(b"half of it")
    code, stderr = attempt(*settings, work=work)
    assert code == 0, stderr
    after = digest(generated)
    assert all(after[name] == before[name] for name in before if name != "manifest.json")
    assert after.keys() == before.keys()  # and the remains are gone
