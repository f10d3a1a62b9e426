"""Stages generate and logits, divided over two processes (gloo), write what one process writes."""

import pickle
import re
from multiprocessing.reduction import ForkingPickler

import lightning as L
import pytest
import torch

import speculative
from pipeline import config as settings
from pipeline import trainer
from pipeline.check import check
from pipeline.config import Config
from pipeline.errors import PipelineError
from tests.pipeline.conftest import SMOKE, copy_work, digest, only, start

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


@pytest.mark.parametrize("strategy", ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.slow)])  # it imports torch anew
def test_two_processes_write_the_same_bytes_as_one(smoke, tmp_path, attempt, strategy):
    one, two = (copy_work(smoke.work, tmp_path / name) for name in ("one", "two"))
    code, stderr = attempt(*GIVEN, work=one)
    assert code == 0, stderr
    _, stdout, stderr, code, _ = start(*GIVEN, "trainer.devices=2", f"trainer.strategy={strategy}", work=two)
    assert code == 0, stderr
    shards = len([name for name in files(two).keys() - files(smoke.work).keys() if name.startswith("logits")])
    half = -(-shards // 2)
    assert re.search(rf"Predicting .* {half}/{half} ", stdout)  # the first of the two did half of them
    assert files(two) == files(one)
    assert len(files(two)) > len(files(smoke.work)) + 10
    assert not list(two.rglob("*.partial"))


def test_what_the_stages_hand_to_lightning_can_be_spawned_and_leaves_the_weights_behind(work, attempt, monkeypatch):
    """What a spawned process is given is pickled; it loads and packs the target itself."""
    packed, handed = [], []

    def predict(runner, module, loader, **options):
        plain = ForkingPickler.dumps((runner, module, loader))
        found = pickle.loads(plain)[1]
        handed.append((type(found).__name__, len(plain), found._held))
        found.on_predict_start()
        assert packed[-1] is found.target is not module.target
        weights = module.target.state_dict()
        assert all(torch.equal(tensor, weights[name]) for name, tensor in found.target.state_dict().items())
        return real(runner, module, loader, **options)

    real = L.Trainer.predict
    monkeypatch.setattr(L.Trainer, "predict", predict)
    monkeypatch.setattr(trainer, "pack", lambda model: packed.append(model) or speculative.pack(model))
    code, stderr = attempt(*GIVEN, work=work)
    assert code == 0, stderr
    assert [name for name, *_ in handed] == ["_Generator", "Teacher"]
    assert all(held == () for *_, held in handed)
    weights = sum(path.stat().st_size for path in only(work / "targets").glob("*.safetensors"))
    assert max(size for _, size, _ in handed) < weights / 2


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
