"""What can happen to a cache from outside: kills, a second writer, a manifest that is gone, a shard from another run."""

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import trainer
from tests.pipeline.conftest import ENVIRONMENT, REPOSITORY, SMOKE, begin, digest, only


def shards(folder) -> dict[str, str]:
    return {name: found for name, found in digest(folder).items() if name.endswith(".safetensors")}


def test_a_shard_from_another_run_is_named_and_never_read(work, attempt):
    mine = only(work / "artifacts" / "logits")
    code, stderr = attempt(SMOKE, "stages=[logits]", "codec.top_k=17", work=work)
    assert code == 0, stderr
    [other] = [path for path in mine.parent.iterdir() if path.is_dir() and path != mine]
    before, path = shards(mine), mine / "train" / "shard-00001.safetensors"
    shutil.copyfile(other / "train" / path.name, path)
    message = rf"train/shard-00001\.safetensors: this shard is from elsewhere: its cache is {other.name}, not {mine.name}"
    for overrides in (["stages=[logits]", "logits.verify=true"], ["stages=[distil]", "trainer.max_steps=2"]):
        code, stderr = attempt(SMOKE, *overrides, work=work)
        assert code == 2
        assert re.search(message, stderr)
    code, stderr = attempt(SMOKE, "stages=[logits]", "logits.repair=true", work=work)
    assert code == 0, stderr
    assert shards(mine) == before


def test_a_cache_whose_manifest_is_gone_is_unfinished_and_not_read(work, attempt):
    folder = only(work / "artifacts" / "logits")
    before = shards(folder)
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("shard-*")}
    (folder / "manifest.json").unlink()
    code, stderr = attempt(SMOKE, "stages=[distil]", "trainer.max_steps=2", work=work)
    assert code == 2
    assert "stages: logits is needed, has no result for these settings, and is not among the stages to run" in stderr
    code, stderr = attempt(SMOKE, "stages=[logits]", work=work)
    assert code == 0, stderr
    assert (folder / "manifest.json").is_file()
    assert shards(folder) == before
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("shard-*")} == times  # whole shards are kept


def test_a_repair_computes_as_the_run_did_and_says_when_the_disk_is_full(work, attempt, refused, monkeypatch):
    folder, write, packed, full = only(work / "artifacts" / "logits"), Path.write_bytes, [], True
    before, path = shards(folder), folder / "train" / "shard-00001.safetensors"
    path.unlink()

    def write_bytes(path: Path, content: bytes) -> int:
        assert packed  # products of packed weights round differently from those of plain ones
        if full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    monkeypatch.setattr(trainer, "pack", packed.append)
    message = refused(SMOKE, "stages=[logits]", "logits.repair=true", work=work)
    assert message.startswith(f"draftsmith: paths.work={work}: the disk is full; make room and give the same command again")
    (path.parent / ".shard-00001.safetensors.1.partial").write_text("of a repair that was killed")
    full = False
    code, stderr = attempt(SMOKE, "stages=[logits]", "logits.repair=true", work=work)
    assert code == 0, stderr
    assert shards(folder) == before
    assert not list(folder.rglob("*.partial"))


def test_of_two_writers_one_writes_and_one_waits(work, tmp_path):
    before = shards(only(work / "artifacts" / "logits"))
    shutil.rmtree(only(work / "artifacts" / "logits"))
    both = [begin(SMOKE, "stages=[logits]", "codec.batch_size=1", work=work, output=tmp_path / name) for name in ("a", "b")]
    assert [process.wait(120) for process in both] == [0, 0], (tmp_path / "a").read_text() + (tmp_path / "b").read_text()
    said = [(tmp_path / name).read_text() for name in ("a", "b")]
    assert sum("logits: begins" in text for text in said) == 1
    folder = only(work / "artifacts" / "logits")
    assert len(shards(folder)) > len(before)
    assert not list(folder.rglob("*.partial"))


KILLER = """
import os, random, shutil, signal, sys, time
from pathlib import Path
import torch
from pipeline import main

work, wanted, options = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
torch.set_num_threads(1)
logits = work / "artifacts" / "logits"

def begin():
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        sys.argv = ["draftsmith", *options, f"paths.work={work}"]
        try:
            main.main()
        except SystemExit as stop:
            os._exit(stop.code or 0)
        os._exit(0)
    return child

def running(child):
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

def found():
    return {path.relative_to(logits): path.read_bytes() for path in logits.rglob("*.safetensors")}

shutil.rmtree(logits)
assert os.waitpid(begin(), 0)[1] == 0
began = time.perf_counter()
shutil.rmtree(logits)
assert os.waitpid(begin(), 0)[1] == 0
longest, calm = time.perf_counter() - began, found()
shutil.rmtree(logits)
kills = halfway = finished = 0
choose = random.Random(0)
while kills < wanted or not finished:
    child = begin()
    if kills < wanted and kills % 4 == 0:  # at any moment of the stage
        time.sleep(longest * choose.random())
    elif kills < wanted:  # at any moment of the writing
        moment = choose.randrange(len(calm))
        while len(list(logits.rglob("shard-*"))) <= moment and running(child):
            time.sleep(1e-4)
        time.sleep(choose.random() * 5e-3)
    if kills < wanted:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    whole = any(logits.glob("*/manifest.json")) if logits.exists() else False
    if status == signal.SIGKILL:
        kills += 1
        halfway += logits.exists() and 0 < len(found()) and not whole
    else:
        assert status == 0, status
    if whole:
        assert found() == calm, f"bytes differ after {kills} kills"
        finished += 1
        shutil.rmtree(logits)
print(kills, halfway, finished)
"""


@pytest.mark.slow  # forty runs of the stage
def test_thirty_kills_of_the_stage_at_random_moments_leave_the_bytes_of_an_undisturbed_run(work):
    options = [SMOKE, "stages=[logits]", "codec.batch_size=1", "codec.top_k=64"]
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(work), "32", *options],
        cwd=work.parent,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kills, halfway, finished = map(int, done.stdout.split())
    assert kills >= 30
    assert finished >= 1
    assert halfway >= 10  # some kills left a part of the shards
