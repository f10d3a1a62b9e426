"""Two processes train as one with twice the batch, and a compiled draft learns what the other does."""

import json
import pickle
from itertools import islice

import pytest
import torch
from safetensors.torch import load_file

from data.artifact import MANIFEST
from data.batching import Divided, LengthGroupedBatches
from data.logit_cache import LogitCache
from pipeline import ranks
from pipeline.check import check
from pipeline.config import Config, Objective, Target, Trainer
from pipeline.errors import PipelineError
from tests.pipeline.conftest import SMOKE, copy_work, only

# A batch of five leaves three rows of an epoch of 48 over, and of four two.
LEARN = (SMOKE, "stages=[distil]", "trainer.max_steps=7", "trainer.validate_every=7", "seed=0", "draft.fit_head=false")
TWO = ("trainer.devices=2", "trainer.strategy=ddp_fork")


def learnt(work) -> tuple[dict[str, torch.Tensor], dict]:
    found = [path.parent for path in (work / "artifacts" / "distil").glob(f"*/{MANIFEST}")]
    newest = max(found, key=lambda folder: (folder / MANIFEST).stat().st_mtime)
    return load_file(newest / "draft" / "draft.safetensors"), json.loads((newest / MANIFEST).read_text())


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def test_two_processes_learn_what_one_does_with_twice_the_batch(work, tmp_path, attempt, monkeypatch):
    alone, two, wrong = (copy_work(work, tmp_path / name) for name in ("alone", "two", "wrong"))
    assert attempt(*LEARN, "trainer.batch_size=10", work=alone)[0] == 0
    code, stderr = attempt(*LEARN, "trainer.batch_size=5", *TWO, work=two)
    assert code == 0, stderr
    (expected, _), (found, manifest) = learnt(alone), learnt(two)
    begun = load_file(only(work / "artifacts" / "distil") / "draft" / "draft.safetensors")
    assert distance(expected, begun) > 1e-2
    assert distance(expected, found) < 2e-4
    assert manifest["identity"]["processes"] == 2
    assert manifest["details"]["epochs"] == pytest.approx(7 * 10 / 48)
    # The planted fault: the mean of each process counts alike, whatever number of positions it is of.
    monkeypatch.setattr(ranks, "portion", torch.ones_like)
    assert attempt(*LEARN, "trainer.batch_size=5", *TWO, work=wrong)[0] == 0
    assert distance(expected, learnt(wrong)[0]) > 2e-3


@pytest.mark.slow  # each process imports torch anew
def test_processes_that_are_spawned(work, tmp_path, attempt):
    forked = copy_work(work, tmp_path / "forked")
    assert attempt(*LEARN, "trainer.batch_size=5", *TWO, work=forked)[0] == 0
    code, stderr = attempt(*LEARN, "trainer.batch_size=5", *TWO[:1], "trainer.strategy=ddp_spawn", work=work)
    assert code == 0, stderr
    assert distance(learnt(forked)[0], learnt(work)[0]) < 1e-6


def test_rows_of_a_batch_are_divided(monkeypatch):
    batches = LengthGroupedBatches([3] * 21, 6, 8, 0, least=2)
    whole = list(batches)
    parts = []
    for rank in range(2):
        monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
        parts.append(list(Divided(batches)))
    for batch, one, other in zip(whole, *parts, strict=True):
        assert sorted(one + other) == sorted(batch)
        assert min(len(one), len(other)) > 0


def test_a_last_batch_too_short_to_share_joins_another():
    epoch = list(islice(LengthGroupedBatches([3] * 13, 6, 2, 0, least=2), 2))
    assert sorted(map(len, epoch)) == [6, 7]
    assert sorted(row for batch in epoch for row in batch) == list(range(13))
    with pytest.raises(ValueError, match="1 rows make no batches of 2 or more"):
        LengthGroupedBatches([3], 6, 2, 0, least=2)


def test_a_cache_goes_to_another_process_and_reads_the_same(work):
    folder = only(work / "artifacts" / "logits")
    cache = LogitCache(folder / "train", folder.name)
    before = cache[3]
    after = pickle.loads(pickle.dumps(cache))[3]
    assert torch.equal(before.tokens, after.tokens)
    assert torch.equal(before.targets.log_probs, after.targets.log_probs)


@pytest.mark.slow  # it compiles
def test_a_compiled_draft_learns_the_same(work, tmp_path, attempt):
    plain = copy_work(work, tmp_path / "plain")
    assert attempt(*LEARN, work=plain)[0] == 0
    code, stderr = attempt(*LEARN, "trainer.compile=true", work=work)
    assert code == 0, stderr
    (expected, _), (found, manifest) = learnt(plain), learnt(work)
    assert manifest["identity"]["trainer"]["compile"] is True
    assert expected.keys() == found.keys()
    assert 0 < distance(expected, found) < 1e-3


def refusal(**given) -> str:
    with pytest.raises(PipelineError) as error:
        check(Config(target=Target(path="x"), **given))
    return str(error.value)


def test_what_several_processes_and_the_compiler_cannot_do(monkeypatch):
    two = Trainer(devices=2, strategy="ddp_spawn")
    message = refusal(trainer=two, objective=Objective(reference="r", keep=0.5))
    assert message.startswith("objective.reference=r: the positions that count are chosen within a batch")
    monkeypatch.setenv("CXX", "no-such-compiler")
    message = refusal(trainer=Trainer(compile=True))
    assert message == (
        "trainer.compile=True: there is no C++ compiler no-such-compiler; install it, or give trainer.compile=false"
    )


def test_too_few_rows_to_share(work, refused):
    message = refused(*LEARN, "trainer.devices=64", "trainer.strategy=ddp_fork", work=work)
    assert "trainer.devices=64: 48 rows are too few to share; give 1" in message
