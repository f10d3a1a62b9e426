"""A sweep survives the death of its parent or of a job, and holds no more at its last job than at its first."""

import gc
import os
import signal
import threading
import traceback
from pathlib import Path

import pytest
import torch
from hydra.experimental.callback import Callback

from pipeline import distil, release
from tests.pipeline.conftest import SMOKE, begin, start, wait_for
from tests.pipeline.test_sweep import family, shown
from tests.pipeline.test_tracking import runs_of

PARALLEL = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")


class Census(Callback):
    """Counts what is alive after each job: bytes of tensors, open files, threads."""

    found: list = []  # noqa: RUF012
    kept: list | None = None  # what a leak would hold; None for none

    def on_job_end(self, config, job_return, **kwargs):
        if Census.kept is not None:
            Census.kept.append(torch.zeros(1000))
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        Census.found.append((sum(t.nbytes for t in tensors), len(os.listdir("/proc/self/fd")), threading.active_count()))  # noqa: PTH208


def census(attempt, work: Path, kept: list | None = None, ends: int = 0) -> list[tuple[int, int, int]]:
    """What was alive after each of four jobs that distil, the sweep ending with the exit code ``ends``."""
    Census.found, Census.kept = [], kept
    probe = "+hydra.callbacks.census._target_=tests.pipeline.test_sweep_kept.Census"
    few = "stages=[corpus,generate,logits,distil]"
    code, stderr = attempt("-m", SMOKE, few, "trainer.validate_every=1", "trainer.max_steps=1,2,3,4", probe, work=work)
    assert code == ends, stderr
    assert len(Census.found) == 4
    return Census.found


def test_memory_files_and_threads_do_not_grow_from_job_to_job(work, attempt):
    first, second, *others = census(attempt, work)
    assert second[0] > 0, "tensors that are always there are seen"
    assert all(later[0] <= second[0] for later in others), (first, second, *others)
    assert all(later[1:] <= second[1:] for later in others), (first, second, *others)


@pytest.mark.slow  # the same four jobs, with a leak planted
def test_a_leak_would_be_seen(work, attempt):
    _, second, third, fourth = census(attempt, work, kept=[])
    assert second[0] < third[0] < fourth[0]


@pytest.fixture
def broken(monkeypatch):
    """Training comes to its end, and then something fails that holds the models."""

    def fail(context, expected, coverage, best):
        raise ZeroDivisionError("a planted defect")

    monkeypatch.setattr(distil, "_record", fail)


def test_jobs_that_failed_keep_nothing_either(work, attempt, broken):
    first, second, *others = census(attempt, work, ends=1)
    assert second[0] > 0
    assert all(later[0] <= second[0] for later in others), (first, second, *others)
    assert all(later[1:] <= second[1:] for later in others), (first, second, *others)


@pytest.mark.slow  # the same four jobs, with the fault planted
def test_what_tracebacks_hold_would_be_seen(work, attempt, broken, monkeypatch):
    monkeypatch.setattr(release, "clear", lambda error: None)
    _, second, third, fourth = census(attempt, work, ends=1)
    assert second[0] < third[0] < fourth[0]


def test_a_trace_that_is_cleared_still_tells_where_it_happened():
    def inner(large):
        raise ValueError("inner")

    def outer():
        try:
            inner(torch.zeros(3))
        except ValueError as error:
            raise RuntimeError("outer") from error

    with pytest.raises(RuntimeError) as raised:
        outer()
    release.clear(raised.value)
    assert "in inner" in "".join(traceback.format_exception(raised.value))
    frame = raised.value.__cause__.__traceback__.tb_next.tb_frame
    assert (frame.f_code.co_name, frame.f_locals) == ("inner", {})


@pytest.fixture
def slow_jobs(prompts) -> tuple[str, ...]:
    """Two jobs side by side that write for a while, shard by shard."""
    few = ("corpus.train=6", "corpus.validation=2", "corpus.test=2", "generate.batch_size=1")
    options = ("-m", SMOKE, "stages=[corpus,generate]", "corpus=dataset", f"corpus.path={prompts}", *few)
    return (*options, *PARALLEL, "generate.max_new_tokens=60,200")


def at_work(work: Path) -> list[int]:
    """Process numbers of the jobs that run."""
    return [int(run.data.tags["draftsmith.pid"]) for run in family_of_jobs(work) if run.info.status == "RUNNING"]


def family_of_jobs(work: Path) -> list:
    return [run for jobs in family(work)[1].values() for run in jobs] if (work / "mlflow.db").is_file() else []


def both_write(work: Path) -> bool:
    return len({path.parent for path in (work / "artifacts/generate").glob("*/shard-*.parquet")}) == 2


@pytest.mark.slow  # three processes, each with its imports
@pytest.mark.parametrize("victim", ["parent", "job"])
def test_a_parallel_sweep_goes_on_after_a_kill(slow_jobs, tmp_path, victim):
    """Kill -9 of one process alone; of a whole group, see ``test_sweep``."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="the extra `joblib` is not installed")
    work = tmp_path / "work"
    process = begin(*slow_jobs, work=work, output=tmp_path / "said", fresh=True)
    wait_for(lambda: both_write(work), process)
    os.kill(process.pid if victim == "parent" else at_work(work)[0], signal.SIGKILL)
    assert process.wait(120) != 0
    _, _, stderr, code, _ = start(*slow_jobs, work=work)
    assert code == 0, stderr
    assert not [run.info.run_name for run in runs_of(work)[1] if run.info.status == "RUNNING"]
    [sweep], jobs, _ = family(work)
    assert sweep.info.status == "FINISHED"
    ends = shown(jobs[sweep.info.run_id])
    assert sorted({tokens for tokens, status in ends if status == "FINISHED"}) == [60, 200]
    assert all(status in ("FINISHED", "KILLED", "FAILED") for _, status in ends)
