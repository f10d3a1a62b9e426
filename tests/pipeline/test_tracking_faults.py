"""What can be wrong with a tracking server or store is said in seconds, and nothing that was to be kept is lost unsaid."""

import contextlib
import errno
import math
import os
import socket
import sqlite3
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from pipeline import server, sweep, tracking
from pipeline.config import Tracking
from pipeline.errors import PipelineError
from pipeline.faults import excerpt
from tests.pipeline.conftest import ENVIRONMENT, SMOKE, begin, command
from tests.pipeline.servers import free_port, running
from tests.pipeline.test_tracking import runs_of

CORPUS = (SMOKE, "stages=[corpus]")
PARENT = "mlflow.parentRunId"


@pytest.fixture
def quick(prompts) -> tuple[str, ...]:
    """The corpus stage on a few prompts."""
    return (*CORPUS, "corpus=dataset", f"corpus.path={prompts}", "corpus.train=6", "corpus.validation=2", "corpus.test=2")


@pytest.fixture
def nowhere() -> str:
    return f"http://127.0.0.1:{free_port()}"


@contextlib.contextmanager
def answering(status: int):
    """A server that answers every request with ``status``; gives its URI."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments):
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        listening.server_close()


def test_a_server_that_is_away_is_named_within_seconds(refused, tmp_path, nowhere):
    work = tmp_path / "work"
    begun = time.monotonic()
    message = refused(*CORPUS, f"tracking.uri={nowhere}", work=work)
    assert time.monotonic() - begun < 10
    assert message.startswith(f"draftsmith: tracking.uri={nowhere}: no server answers there (")
    assert "start it, correct the address, or give tracking.required=false" in message
    assert not (work / "artifacts").exists()


def test_a_sweep_whose_server_is_away_begins_no_job(refused, tmp_path, nowhere):
    message = refused("-m", *CORPUS, "seed=1,2", f"tracking.uri={nowhere}", work=tmp_path / "work")
    assert f"tracking.uri={nowhere}: no server answers there" in message
    assert not (tmp_path / "work" / "artifacts").exists()


def test_a_server_that_need_not_answer_is_given_up_loudly(attempt, tmp_path, nowhere, quick):
    work = tmp_path / "work"
    code, stderr = attempt(*quick, f"tracking.uri={nowhere}", "tracking.required=false", work=work)
    assert code == 0, stderr
    assert f"warning: tracking.uri={nowhere} did not answer and tracking.required=false: NOTHING IS SENT THERE" in stderr
    assert [run.info.status for run in runs_of(work)[1]] == ["FINISHED", "FINISHED"]
    [note] = (work / "runs").glob(f"*/{server.NOTE}")
    assert nowhere in note.read_text()


def test_all_jobs_of_a_sweep_go_to_the_store_that_it_began_in(attempt, tmp_path, nowhere, quick):
    work = tmp_path / "work"
    code, stderr = attempt("-m", *quick, "seed=1,2", f"tracking.uri={nowhere}", "tracking.required=false", work=work)
    assert code == 0, stderr
    assert stderr.count("NOTHING IS SENT THERE") == 3, "once for the sweep, once for each job"
    runs = runs_of(work)[1]
    [top] = [run for run in runs if PARENT not in run.data.tags]
    assert [r.info.status for r in runs if r.data.tags.get(PARENT) == top.info.run_id] == ["FINISHED", "FINISHED"]


def test_a_job_does_not_leave_the_server_of_its_sweep(tmp_path, nowhere):
    away = Tracking(uri=nowhere, required=False)
    with pytest.raises(server.UnreachableError, match="no server answers"):
        server.settled(away, tmp_path, joins=True)
    assert server.settled(away, tmp_path, joins=False).uri is None
    assert server.settled(away, tmp_path, joins=True).uri is None, "the sweep has gone to the local store"
    with answering(200) as uri:
        back = Tracking(uri=uri, required=False)
        assert server.settled(back, tmp_path, joins=True).uri is None, "it stays there when the server comes back"
        assert server.settled(back, tmp_path, joins=False) == back
        assert not (tmp_path / server.NOTE).exists(), "the next sweep in this folder is not bound by it"


@pytest.mark.parametrize("status", [200, 401, 404, 500])
def test_whatever_answers_for_itself_is_there(status):
    with answering(status) as uri:
        server.demand(uri)
        server.demand(f"{uri}/")


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_gateway_that_answers_for_a_server_is_not_the_server(status):
    with answering(status) as uri, pytest.raises(server.UnreachableError, match=f"no server answers there .*{status}"):
        server.demand(uri)


def test_a_server_that_stays_silent_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(server, "SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        with pytest.raises(server.UnreachableError, match="timed out"):
            server.demand(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert time.monotonic() - begun < 3


@pytest.mark.parametrize("uri", ["http://", "http://127.0.0.1:99999", "http://127.0.0.1:port"])
def test_an_address_that_is_none_is_refused_alike(uri):
    with pytest.raises(server.UnreachableError, match="no server answers there"):
        server.demand(uri)


@pytest.mark.parametrize("uri", ["", "sqlite:///x.db", "databricks", "file:///x"])
def test_a_store_that_is_no_server_is_not_asked(uri):
    server.demand(uri)


def spoiled(work: Path, schema: str) -> Path:
    """A store under ``work`` that says it has this schema."""
    made = work.with_name("made")
    made.mkdir(parents=True)
    with tracking.execution(Tracking(), made, "first", {}):
        pass
    work.mkdir()
    (work / "mlflow.db").write_bytes((made / "mlflow.db").read_bytes())
    with contextlib.closing(sqlite3.connect(work / "mlflow.db")) as store, store:
        store.execute("UPDATE alembic_version SET version_num = ?", (schema,))
    return work


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("ffffffffffff", "a newer MLflow wrote this store (schema ffffffffffff is unknown to MLflow "),
        ("0c779009ac13", "an older MLflow wrote this store (schema 0c779009ac13); make a copy of it, then run `mlflow db"),
    ],
)
def test_a_store_of_another_mlflow_is_told_from_an_older_one(refused, tmp_path, schema, words):
    work = spoiled(tmp_path / "work", schema)
    message = refused(*CORPUS, work=work)
    assert message.startswith(f"draftsmith: tracking.uri=sqlite:///{work}/mlflow.db: ")
    assert words in message


def test_an_artifact_root_that_cannot_be_written_is_refused_before_any_stage(refused, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "file").touch()
    client = MlflowClient(f"sqlite:///{work / 'mlflow.db'}")
    client.create_experiment("draftsmith", (tmp_path / "file" / "artifacts").as_uri())
    message = refused(*CORPUS, work=work)
    assert message.startswith(f"draftsmith: tracking.uri=sqlite:///{work}/mlflow.db: the artifact root cannot be written (")
    assert "choose another tracking.experiment" in message
    assert not (work / "artifacts").exists()
    [run] = runs_of(work)[1]
    assert run.info.status == "FAILED"
    assert "the artifact root cannot be written" in run.data.tags["error"]


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (OSError(errno.EROFS, "Read-only file system"), PipelineError, "Read-only file system"),
        (PermissionError(errno.EACCES, "Permission denied"), PipelineError, "Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device"), OSError, "No space left"),
        (FileNotFoundError(errno.ENOENT, "gone"), FileNotFoundError, "gone"),
    ],
)
def test_only_the_root_is_blamed_for_what_it_does(tmp_path, monkeypatch, error, expected, words):
    def refuse(*arguments):
        raise error

    monkeypatch.setattr(MlflowClient, "log_artifact", refuse)
    run = tracking.open_sweep(Tracking(), tmp_path, "sweep", "command", "token")
    with pytest.raises(expected, match=words) as caught:
        run.file(tmp_path / "x")
    assert type(caught.value) is expected


def test_a_long_param_is_kept_whole_and_says_where(tmp_path):
    long, edge = "".join(f"{n}," for n in range(3000)), "x" * 6000
    with tracking.execution(Tracking(), tmp_path, "run", {}) as run:
        run.params({"corpus.ids": long, "edge": edge, "short": 1})
    client = run.client
    params = client.get_run(run.run_id).data.params
    assert (params["edge"], params["short"]) == (edge, "1")
    assert len(params["corpus.ids"]) == 6000
    assert params["corpus.ids"].startswith("0,1,2,")
    assert f"… ({len(long):,} characters, whole in params/corpus.ids.txt, SHA-256 " in params["corpus.ids"]
    assert Path(client.download_artifacts(run.run_id, "params/corpus.ids.txt")).read_text() == long
    assert [item.path for item in client.list_artifacts(run.run_id, "params")] == ["params/corpus.ids.txt"]


def test_jobs_whose_long_overrides_begin_alike_are_two_jobs(tmp_path):
    config, begins = Tracking(), "corpus.path=" + "x" * 9000
    sweep_run = tracking.open_sweep(config, tmp_path, "sweep", "command", "token")
    for end in ("a", "b"):
        with tracking.execution(config, tmp_path, end, {}, "token") as run:
            run.tags({"overrides": begins + end})
    tags = [run.data.tags["overrides"] for run in sweep_run.last_attempts()]
    assert len(set(tags)) == 2
    assert all(len(tag) <= 5000 and "… (9,013 characters, SHA-256 " in tag for tag in tags)


def test_an_excerpt_is_the_text_itself_while_it_fits():
    assert excerpt("x" * 10, 10) == "x" * 10
    cut = excerpt("y" * 101, 100, ", whole there")
    assert len(cut) == 100
    assert cut.startswith("y")
    assert "… (101 characters, whole there, SHA-256 " in cut


def test_a_metric_that_is_no_number_is_named_not_logged(tmp_path):
    with tracking.execution(Tracking(), tmp_path, "run", {}) as run:
        run.metrics({"speed/ratio": 1.5, "acceptance/position_5": math.nan})
        run.metrics({"cost/draft": math.inf, "acceptance/position_5": math.nan})
    data = run.client.get_run(run.run_id).data
    assert data.metrics == {"speed/ratio": 1.5}
    assert data.tags["metrics_undefined"] == "acceptance/position_5 cost/draft"


def test_a_run_without_undefined_metrics_has_no_such_tag(tmp_path):
    with tracking.execution(Tracking(), tmp_path, "run", {}) as run:
        run.metrics({"speed/ratio": 1.5})
    assert "metrics_undefined" not in run.client.get_run(run.run_id).data.tags


def test_two_sweeps_begun_at_once_are_two_though_their_commands_are_one(tmp_path):
    """Both may go on below the finished run of an earlier sweep; one does, the other begins anew."""
    config, values = Tracking(), {"seed": 0}
    sweep.end(sweep.begin(config, tmp_path, ["seed=1,2"], values, "earlier"), None)
    opened, gate = {}, threading.Barrier(2)

    def begin_one(token: str) -> None:
        gate.wait()
        opened[token] = sweep.begin(config, tmp_path, ["seed=1,2"], values, token)

    threads = [threading.Thread(target=begin_one, args=(token,)) for token in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened["a"].run_id != opened["b"].run_id
    for token, run in opened.items():
        with tracking.execution(config, tmp_path, token, {}, token):
            pass
        assert [child.info.run_name for child in run.children()] == [token]


def test_two_sweeps_in_one_folder_are_refused(tmp_path):
    config, values = Tracking(), {"seed": 0}
    first = sweep.begin(config, tmp_path, ["seed=1,2"], values, "same")
    with pytest.raises(PipelineError, match=r"^hydra\.sweep\.dir: another sweep is at work in this folder; give each its own"):
        sweep.begin(config, tmp_path, ["seed=3,4"], values, "same")
    sweep.end(first, None)
    assert sweep.begin(config, tmp_path, ["seed=3,4"], values, "same").run_id != first.run_id


@pytest.mark.slow
def test_two_commands_given_at_once_do_not_disturb_each_other(tmp_path, quick):
    arguments = ("-m", *quick, "seed=1,2")
    work = tmp_path / "work"
    both = [begin(*arguments, work=work, output=tmp_path / f"said{n}") for n in range(2)]
    codes = [process.wait(300) for process in both]
    assert codes == [0, 0], (tmp_path / "said0").read_text() + (tmp_path / "said1").read_text()
    runs = runs_of(work)[1]
    tops = [run for run in runs if PARENT not in run.data.tags]
    assert {run.info.status for run in runs} == {"FINISHED"}
    overrides = sorted(run.data.params["seed"] for top in tops for run in runs if run.data.tags.get(PARENT) == top.info.run_id)
    assert len(tops) in (1, 2), "the second went on below the first if that had ended"
    assert sorted(set(overrides)) == ["1", "2"]


@pytest.fixture(scope="module")
def real_server(tmp_path_factory):
    """`mlflow server` on 127.0.0.1 with its default store; gives its URI."""
    with running("server", tmp_path_factory.mktemp("server")) as uri:
        yield uri


@pytest.mark.slow
def test_a_real_server_takes_runs_params_and_artifacts(real_server, tmp_path):
    name = "a long name " * 700
    arguments = command(*CORPUS, f"tracking.uri={real_server}", f"corpus.column='{name}'", work=tmp_path / "work")
    done = subprocess.run(arguments, cwd=tmp_path, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "work" / "mlflow.db").exists()
    client = MlflowClient(real_server)
    experiment = client.get_experiment_by_name("draftsmith").experiment_id
    top, stage = client.search_runs([experiment], order_by=["attributes.start_time ASC"])
    assert (stage.info.run_name, stage.data.tags[PARENT]) == ("corpus", top.info.run_id)
    assert {top.info.status, stage.info.status} == {"FINISHED"}
    assert "whole in params/corpus.column.txt" in top.data.params["corpus.column"]
    whole = client.download_artifacts(top.info.run_id, "params/corpus.column.txt", str(tmp_path))
    assert Path(whole).read_text().strip() == name.strip()


@pytest.mark.slow
def test_a_real_server_takes_a_sweep(real_server, tmp_path):
    arguments = command(
        "-m", *CORPUS, "seed=1,2", f"tracking.uri={real_server}", "tracking.experiment=swept", work=tmp_path / "w"
    )
    done = subprocess.run(arguments, cwd=tmp_path, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    client = MlflowClient(real_server)
    runs = client.search_runs([client.get_experiment_by_name("swept").experiment_id])
    [top] = [run for run in runs if PARENT not in run.data.tags]
    jobs = [run for run in runs if run.data.tags.get(PARENT) == top.info.run_id]
    assert sorted(run.data.params["seed"] for run in jobs) == ["1", "2"]
    assert {run.info.status for run in runs} == {"FINISHED"}
