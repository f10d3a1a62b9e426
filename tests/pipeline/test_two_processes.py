"""Stages generate and logits, divided over two processes (gloo), write what one process writes."""

import re

import pytest

from pipeline import config as settings
from pipeline.check import check
from pipeline.config import Config
from pipeline.errors import PipelineError
from tests.pipeline.conftest import SMOKE, copy_work, digest, start

GIVEN = (SMOKE, "stages=[generate,logits]", "generate.keep_states=false", "generate.batch_size=8", "codec.batch_size=2")


def files(work) -> dict[str, str]:
    """Digests of what both stages wrote, less their manifests, which hold rates."""
    stages = ((name, work / "artifacts" / name) for name in ("generate", "logits"))
    return {
        f"{name}/{file}": found
        for name, folder in stages
        for file, found in digest(folder).items()
        if not file.endswith((".json", ".lock"))
    }


def test_two_processes_write_the_same_bytes_as_one(smoke, tmp_path, attempt):
    one, two = (copy_work(smoke.work, tmp_path / name) for name in ("one", "two"))
    code, stderr = attempt(*GIVEN, work=one)
    assert code == 0, stderr
    _, stdout, stderr, code, _ = start(*GIVEN, "trainer.devices=2", "trainer.strategy=ddp_fork", work=two)
    assert code == 0, stderr
    shards = len([name for name in files(two).keys() - files(smoke.work).keys() if name.startswith("logits")])
    half = -(-shards // 2)
    assert re.search(rf"Predicting .* {half}/{half} ", stdout)  # the first of the two did half of them
    assert files(two) == files(one)
    assert len(files(two)) > len(files(smoke.work)) + 10
    assert not list(two.rglob("*.partial"))


@pytest.mark.parametrize(
    "given", [{"devices": 2}, {"devices": 2, "strategy": "ddp"}, {"num_nodes": 2, "strategy": "ddp_spawn"}]
)
def test_processes_that_would_each_begin_the_whole_run_are_refused(given):
    target = settings.Target(path="x")
    with pytest.raises(
        PipelineError, match=r"^trainer\.strategy=\w+: .*give ddp_spawn \(or ddp_fork, on processors\) and one node"
    ):
        check(Config(trainer=settings.Trainer(**given), target=target))
    check(Config(trainer=settings.Trainer(devices=2, strategy="ddp_spawn"), target=target))
