"""One smoke run for the whole session, copies of its folder to spoil, and ways to start ``python -m pipeline``."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock

from pipeline import calibrate, contestants
from pipeline import main as entry
from pipeline.tiny import byte_tokenizer
from tests.pipeline import stores
from tests.pipeline.forks import Fork

REPOSITORY = Path(__file__).parents[2]
SMOKE = "+experiment=smoke"
STAGES = ("corpus", "generate", "logits", "distil", "calibrate", "speculate", "report", "export")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@dataclass(frozen=True)
class Done:
    """A finished execution; ``seconds`` of processor time; ``outside`` are files it left beside its work folder."""

    work: Path
    stdout: str
    stderr: str
    returncode: int
    seconds: float
    outside: tuple[str, ...] = ()
    git_before: str = ""
    git_after: str = ""


@pytest.fixture(scope="session", autouse=True)
def offline():
    """No test reaches the network, in a process of its own or in this one."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patch.setenv(name, "1")
        yield


@pytest.fixture(scope="session")
def shared(tmp_path_factory, worker_id) -> Path:
    """A folder that all workers have."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session", autouse=True)
def store(shared):
    """An empty store of MLflow; it is copied wherever this process would build one."""
    with pytest.MonkeyPatch.context() as patch:
        stores.copied(patch, found := stores.built(shared))
        yield found


@pytest.fixture(scope="session")
def smoke(shared) -> Done:
    """The smoke experiment, run once for all workers, from an empty directory and with a temporary folder of its own.

    No test may change it: ``work`` is a copy to spoil.
    """
    root = shared / "smoke"
    kept = root.with_suffix(".json")
    with FileLock(root.with_suffix(".lock")):
        if not kept.is_file():
            kept.write_text(json.dumps(_smoke(root), default=str))
    done = json.loads(kept.read_text())
    return Done(**{**done, "work": Path(done["work"]), "outside": tuple(done["outside"])})


def _smoke(root: Path) -> dict[str, object]:
    for name in ("cwd", "tmp"):
        (root / name).mkdir(parents=True)
    before = git_status()
    done = start(SMOKE, work=root / "work", cwd=root / "cwd", TMPDIR=str(root / "tmp"))
    outside = sorted(str(p.relative_to(root)) for name in ("cwd", "tmp") for p in (root / name).rglob("*"))
    return asdict(Done(*done, outside=tuple(outside), git_before=before, git_after=git_status()))


@pytest.fixture
def work(smoke, tmp_path) -> Path:
    """A copy of the smoke run's folder."""
    return copy_work(smoke.work, tmp_path / "work")


@pytest.fixture(scope="session")
def prompts(tmp_path_factory) -> Path:
    """A file of the user's own prompts."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say the number {i} in {i % 7} words."}) + "\n" for i in range(200)))
    return path


@pytest.fixture
def attempt(monkeypatch, capsys):
    """Run the console script in this process; gives its exit code and what it wrote to stderr."""
    for measuring in (calibrate, contestants):
        monkeypatch.setattr(measuring, "REPEATS", 2)  # the smoke run calibrates with all seven

    def run(*overrides: str, work: Path) -> tuple[int, str]:
        monkeypatch.setattr(entry, "_progress", entry._Progress())
        monkeypatch.setattr(sys, "argv", ["draftsmith", *overrides, f"paths.work={work}"])
        capsys.readouterr()
        return exit_code(), capsys.readouterr().err

    return run


@pytest.fixture
def refused(attempt):
    """Run overrides that must be refused: exit code 2, one message, finished work untouched. Gives the message."""

    def run(*overrides: str, work: Path) -> str:
        before = digest(work / "artifacts")
        code, stderr = attempt(*overrides, work=work)
        assert code == 2, stderr
        assert "Traceback" not in stderr
        message = stderr[stderr.index("draftsmith: ") :]
        assert before.items() <= digest(work / "artifacts").items()
        return message

    return run


def exit_code() -> int:
    """Of the console script with the arguments that are set, run in this process."""
    with kept_process_state():
        try:
            entry.main()
        except SystemExit as stop:
            return stop.code
    return 0


@contextlib.contextmanager
def kept_process_state():
    """The console script sets what a process owns: umask, signals, threads, environment."""
    mask, threads, environment = os.umask(0), torch.get_num_threads(), dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    os.umask(mask)
    try:
        yield
    finally:
        os.umask(mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(environment)


def command(*overrides: str, work: Path | None = None) -> list[str]:
    place = [] if work is None else [f"paths.work={work}"]
    return [sys.executable, "-m", "pipeline", *overrides, *place]


def start(*overrides: str, work: Path, cwd: Path | None = None, **environment: str) -> tuple[Path, str, str, int, float]:
    """Run the pipeline in a process of its own; other tests may share the cores, so its processor time counts."""
    before = os.times()
    done = subprocess.run(
        command(*overrides, work=work),
        cwd=cwd or work.parent,
        env=os.environ | ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return work, done.stdout, done.stderr, done.returncode, seconds


def begin(*overrides: str, work: Path, output: Path, fresh: bool = False) -> Fork | subprocess.Popen:
    """Start the pipeline as a process group of its own; what it says goes to the file ``output``."""
    if not fresh:
        return Fork([*overrides, f"paths.work={work}"], output.parent, ENVIRONMENT, output, output)
    with output.open("w") as stream:
        return subprocess.Popen(
            command(*overrides, work=work),
            cwd=output.parent,
            env=os.environ | ENVIRONMENT,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def forked(*overrides: str, work: Path) -> tuple[Path, str, str, int]:
    """As ``start``, without the seconds that a fresh process needs for its imports."""
    output, errors = (work.with_name(f"{work.name}.{name}") for name in ("stdout", "stderr"))
    code = Fork([*overrides, f"paths.work={work}"], work.parent, ENVIRONMENT, output, errors).wait(600)
    return work, output.read_text(), errors.read_text(), code


def wait_for(found, process: Fork | subprocess.Popen, seconds: float = 240) -> None:
    """Wait until ``found()`` holds, while the process lives."""
    limit = time.monotonic() + seconds
    while not found():
        assert process.poll() is None, f"the process ended by itself with {process.returncode}"
        assert time.monotonic() < limit, "it never happened"
        time.sleep(0.005)


def copy_work(source: Path, destination: Path) -> Path:
    """Copy a work folder; new runs of the copied store put their artifacts into the copy."""
    shutil.copytree(source, destination, ignore=shutil.ignore_patterns("mlartifacts", "runs"))
    with contextlib.closing(sqlite3.connect(destination / "mlflow.db")) as store, store:
        store.execute("UPDATE experiments SET artifact_location = ?", ((destination / "mlartifacts").as_uri(),))
    return destination


def digest(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below ``folder`` by its relative path."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def only(folder: Path) -> Path:
    """The one artifact folder of a stage."""
    [found] = [p for p in folder.iterdir() if p.is_dir()]
    return found


def git_status() -> str:
    done = subprocess.run(
        ["git", "-C", str(REPOSITORY), "status", "--porcelain", "--ignored=no"], capture_output=True, text=True, check=False
    )
    return done.stdout


def write_gguf(path: Path, scale: float = 1.0) -> Path:
    """A tiny Llama as a GGUF file, with the byte-level vocabulary."""
    from gguf import GGUFWriter

    tokens = [token for token, _ in sorted(byte_tokenizer().get_vocab().items(), key=lambda item: item[1])] + ["ab"]
    width, inner, heads = 32, 64, 4
    random = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_block_count(2)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {"token_embd": (len(tokens), width), "output_norm": (width,)}
    for block in range(2):
        names = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (width, width))
        names |= {"attn_norm": (width,), "ffn_norm": (width,)}
        names |= {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
        shapes |= {f"blk.{block}.{name}": shape for name, shape in names.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", (scale * random.standard_normal(shape)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
