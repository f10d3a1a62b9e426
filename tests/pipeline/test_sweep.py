"""A sweep is one run with its jobs below it; jobs share what they can, fail alone, and are not repeated when finished."""

import contextlib
import multiprocessing
import os
import re
import signal
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock
from hydra.experimental.callback import Callback

from pipeline import flow, tracking
from pipeline.choices import Stage
from pipeline.config import Tracking
from tests.pipeline.conftest import SMOKE, begin, forked, start, wait_for
from tests.pipeline.stores import place
from tests.pipeline.test_tracking import runs_of

PARENT = "mlflow.parentRunId"


class Probe(Callback):
    """Keeps what jobs return to a sweeper."""

    returned: list = []  # noqa: RUF012

    def on_job_end(self, config, job_return, **kwargs):
        Probe.returned.append(job_return.return_value)


@pytest.fixture(scope="module")
def settings(prompts) -> list[str]:
    """A sweep whose jobs write a few tokens."""
    few = ["corpus.train=6", "corpus.validation=2", "corpus.test=2"]
    return ["-m", SMOKE, "stages=[corpus,generate]", "corpus=dataset", f"corpus.path={prompts}", *few]


@pytest.fixture(scope="module")
def swept(settings, store, tmp_path_factory):
    """Three jobs, the second of which cannot run."""
    return forked(*settings, "generate.max_new_tokens=4,0,5", work=place(store, tmp_path_factory.mktemp("sweep") / "work"))


def family(work: Path) -> tuple[list, dict[str, list], dict[str, list]]:
    """Runs of sweeps; those of their jobs by sweep; those of stages by job."""
    _, runs = runs_of(work)
    tops = [run for run in runs if PARENT not in run.data.tags]
    jobs = {top.info.run_id: [r for r in runs if r.data.tags.get(PARENT) == top.info.run_id] for top in tops}
    stages = {
        job.info.run_id: [r for r in runs if r.data.tags.get(PARENT) == job.info.run_id]
        for below in jobs.values()
        for job in below
    }
    return tops, jobs, stages


def summary(runs: list) -> list[tuple[str, str]]:
    return [(run.info.run_name, run.info.status) for run in runs]


def shown(runs: list) -> list[tuple[int, str]]:
    return [(int(re.search(r"max_new_tokens=(\d+)", run.info.run_name)[1]), run.info.status) for run in runs]


def test_one_run_for_the_sweep_one_for_each_job_stages_below(swept):
    work, _, stderr, _ = swept
    [sweep], jobs, stages = family(work)
    below = jobs[sweep.info.run_id]
    assert shown(below) == [(4, "FINISHED"), (0, "FAILED"), (5, "FINISHED")], stderr
    assert [summary(stages[run.info.run_id]) for run in below] == [
        [("corpus", "FINISHED"), ("generate", "FINISHED")],
        [],
        [("generate", "FINISHED")],
    ], "the corpus is computed once"
    assert [run.data.params["generate.max_new_tokens"] for run in below] == ["4", "0", "5"]


def test_a_failing_job_leaves_its_overrides_and_the_sweep_lists_it(swept):
    work, stdout, stderr, code = swept
    [sweep], jobs, _ = family(work)
    failed = jobs[sweep.info.run_id][1]
    assert "generate.max_new_tokens=0" in failed.data.tags["overrides"]
    assert failed.data.tags["error"] == "generate.max_new_tokens=0: give a number above 0"
    assert sweep.info.status == "FAILED"
    assert code == 2
    last = stderr[stderr.index("draftsmith: ") :]
    assert last.startswith("draftsmith: one job of the sweep failed, the others are finished:\n")
    assert "generate.max_new_tokens=0" in last.splitlines()[1]
    assert "give a number above 0" in last
    assert "Traceback" not in stderr
    assert "job 1 failed: generate.max_new_tokens=0" in stdout, "it is said when it happens, too"


def test_the_same_command_repeats_failed_jobs_alone(swept, settings, attempt):
    work = swept[0]
    before = family(work)
    code, _ = attempt(*settings, "generate.max_new_tokens=4,0,5", work=work)
    tops, jobs, stages = family(work)
    assert code == 2
    assert [run.info.run_id for run in tops] == [run.info.run_id for run in before[0]]
    assert shown(jobs[tops[0].info.run_id]) == [(4, "FINISHED"), (0, "FAILED"), (5, "FINISHED"), (0, "FAILED")]
    assert sum(map(len, stages.values())) == 3
    assert tops[0].info.status == "FAILED"


def test_a_job_whose_result_is_gone_is_repeated(swept, settings, attempt):
    work = swept[0]
    code, _ = attempt(*settings, "generate.max_new_tokens=4,5,6", work=work)
    assert code == 0
    sweep = family(work)[0][-1]
    assert sweep.info.status == "FINISHED"
    [gone] = [r.data.tags for r in runs_of(work)[1] if r.info.run_name == "generate" and r.data.tags[PARENT] == newest(work, 6)]
    (Path(gone["folder"]) / "manifest.json").unlink()
    code, _ = attempt(*settings, "generate.max_new_tokens=4,5,6", work=work)
    assert code == 0
    _, jobs, _ = family(work)
    assert shown(jobs[sweep.info.run_id]) == [(4, "FINISHED"), (5, "FINISHED"), (6, "FINISHED"), (6, "FINISHED")]


def newest(work: Path, tokens: int) -> str:
    runs = [r for r in runs_of(work)[1] if r.data.params.get("generate.max_new_tokens") == str(tokens)]
    return runs[-1].info.run_id


def test_a_defect_in_one_job_is_told_from_what_a_user_can_mend(swept, settings, attempt, monkeypatch):
    work = swept[0]

    def broken(context):
        raise ZeroDivisionError("a planted defect")

    monkeypatch.setattr(flow.MODULES[Stage.generate], "identity", broken)
    code, stderr = attempt(*settings, "generate.max_new_tokens=7,0", work=work)
    assert code == 1
    assert "2 jobs of the sweep failed" in stderr
    assert "a planted defect" in stderr


@pytest.mark.parametrize("override", ["no_such_key=1,2", "trainer.no_such_key=1,2", "trainer.max_steps=2,many"])
def test_a_sweep_over_what_is_not_there_is_refused_and_leaves_no_run(swept, settings, refused, override):
    work = swept[0]
    before = [run.info.run_id for run in runs_of(work)[1]]
    message = refused(*settings, override, work=work)
    assert message.startswith("draftsmith: configuration: ")
    assert override.partition("=")[0].rpartition(".")[2] in message or "many" in message
    assert [run.info.run_id for run in runs_of(work)[1]] == before


def test_a_sweep_over_the_store_is_refused(swept, settings, attempt):
    code, stderr = attempt(*settings, "tracking.experiment=a,b", work=swept[0])
    assert code == 2
    assert "do not sweep over them" in stderr


@pytest.mark.slow  # two whole jobs
def test_jobs_return_the_measured_ratio_and_share_cache_and_calibration(work, attempt):
    """The command of the documentation, on the results of a smoke run."""
    Probe.returned.clear()
    probe = "+hydra.callbacks.probe._target_=tests.pipeline.test_sweep.Probe"
    code, stderr = attempt("-m", SMOKE, "trainer.max_steps=2,4", "decoding.baselines=false", probe, work=work)
    assert code == 0, stderr
    [sweep] = [run for run in family(work)[0] if "draftsmith.sweep" in run.data.tags]
    _, jobs, stages = family(work)
    below = jobs[sweep.info.run_id]
    assert Probe.returned == [run.data.metrics["speed/ratio"] for run in below]
    assert [run.data.params["trainer.max_steps"] for run in below] == ["2", "4"]
    for run in below:
        assert [name for name, _ in summary(stages[run.info.run_id])] == ["distil", "speculate", "report", "export"]


@pytest.fixture(scope="module")
def killed(settings, store, tmp_path_factory) -> tuple[Path, list[str]]:
    """A sweep killed without warning in its second job, after the first had finished."""
    root = tmp_path_factory.mktemp("killed")
    command = [*settings, "generate.batch_size=1", "generate.max_new_tokens=2,60"]
    process = begin(*command, work=place(store, root / "work"), output=root / "said")
    generated = root / "work/artifacts/generate"
    wait_for(lambda: len({path.parent for path in generated.glob("*/shard-*.parquet")}) == 2, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return root / "work", command


def test_the_same_command_goes_on_after_a_kill(killed, attempt):
    work, command = killed
    [sweep], jobs, _ = family(work)
    assert sweep.info.status == "RUNNING"
    assert shown(jobs[sweep.info.run_id]) == [(2, "FINISHED"), (60, "RUNNING")]
    code, stderr = attempt(*command, work=work)
    assert code == 0, stderr
    [again], jobs, stages = family(work)
    assert again.info.run_id == sweep.info.run_id
    assert again.info.status == "FINISHED"
    assert shown(jobs[sweep.info.run_id]) == [(2, "FINISHED"), (60, "KILLED"), (60, "FINISHED")]
    assert {run.info.status for run in runs_of(work)[1]} == {"FINISHED", "KILLED"}
    assert [len(below) for below in stages.values()] == [2, 1, 1]


@pytest.mark.slow  # two processes, each with its imports
def test_two_sweeps_begun_together_keep_apart_and_compute_once(settings, tmp_path):
    work = tmp_path / "work"
    command = [*settings, "generate.max_new_tokens=4,5"]
    both = [begin(*command, work=work, output=tmp_path / name) for name in ("one", "two")]
    assert [process.wait(120) for process in both] == [0, 0], (tmp_path / "one").read_text() + (tmp_path / "two").read_text()
    tops, jobs, stages = family(work)
    assert summary(tops) == [(tops[0].info.run_name, "FINISHED")] * len(tops)
    finished = [run for top in tops for run in jobs[top.info.run_id]]
    assert all(run.info.status == "FINISHED" for run in finished)
    assert len(list((work / "sweeps").iterdir())) == 2
    names = sorted(run.info.run_name for below in stages.values() for run in below)
    assert names == ["corpus", "generate", "generate"], "each result is computed once"


def test_who_waits_for_a_result_says_so(tmp_path, caplog):
    folder, events = tmp_path / "result", []
    held = threading.Event()

    def compute() -> None:
        with FileLock(folder.with_suffix(".lock")):
            held.set()
            time.sleep(0.3)
            events.append("computed")

    other = threading.Thread(target=compute)
    other.start()
    held.wait()
    with caplog.at_level("INFO", logger="draftsmith"), flow._alone(Stage.logits, folder):
        events.append("read")
    other.join()
    assert events == ["computed", "read"]
    assert "logits: another process computes it, waiting" in caplog.text


def test_four_jobs_at_once_leave_a_whole_store(tmp_path):
    context = multiprocessing.get_context("fork")
    for steps in (0, 40):  # first who opens the sweep, then its jobs; the store is new and no process has it open
        workers = [context.Process(target=write, args=(tmp_path, number, steps)) for number in range(4 if steps else 1)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert [worker.exitcode for worker in workers] == [0] * len(workers)
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        assert store.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    [_], jobs, stages = family(tmp_path)
    [below] = jobs.values()
    assert sorted(summary(below)) == [(f"job {number}", "FINISHED") for number in range(4)]
    assert all(run.data.metrics == {"m": 39.0} and len(stages[run.info.run_id]) == 1 for run in below)


def write(work: Path, number: int, steps: int) -> None:
    if not steps:
        tracking.open_sweep(Tracking(), work, "sweep", "command", "token").end("FINISHED")
        return
    with tracking.execution(Tracking(), work, f"job {number}", {}, "token") as run, run.child("stage", {}):
        for step in range(steps):
            run.metrics({"m": step}, step)


def test_joblib_launcher(settings, tmp_path):
    """Jobs in processes of their own find their sweep and report to it."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="the extra `joblib` is not installed")
    parallel = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    work, _, stderr, code, _ = start(*settings, *parallel, "generate.max_new_tokens=4,0,5", work=tmp_path / "work")
    assert code == 2
    assert "one job of the sweep failed" in stderr
    [sweep], jobs, stages = family(work)
    assert sorted(shown(jobs[sweep.info.run_id])) == [(0, "FAILED"), (4, "FINISHED"), (5, "FINISHED")]
    assert sorted(run.info.run_name for below in stages.values() for run in below) == ["corpus", "generate", "generate"]
