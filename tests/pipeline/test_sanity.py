"""Distillation as a whole: labels stand where they belong from cache to loss, and it learns what there is to learn only."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from data.batching import Batch, collate
from data.hidden import Hidden
from data.logit_cache import LogitCache, Row
from data.responses import Request, Response
from data.shards import Seal
from data.targets import SparseTargets
from data.topk import TopK
from pipeline import losses
from pipeline.config import Draft as DraftConfig
from pipeline.draft import build
from pipeline.errors import PipelineError
from pipeline.teacher import Teacher, Work
from speculative import Sampling, generate
from speculative.metrics import total
from tests.pipeline.test_module import KEPT, VOCABULARY, loader, model, module, trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*litlogger.*")

# Three turns: prompts of 2, 1 and 5 tokens, responses of 2, 3 and 1.
TURNS = [((5, 6), (7, 8)), ((9,), (10, 33, 12)), ((1, 2, 3, 4, 11), (35,))]


def responses() -> list[Response]:
    return [
        Response(Request(key, f"p{key}", "train", "say", 1.0, prompt), tokens, True)
        for key, (prompt, tokens) in enumerate(TURNS)
    ]


def cached(target, folder: Path, codec) -> Batch:
    """The turns through the teacher, a shard on disk, the reader and the collator, in the order of ``TURNS``."""
    seal = Seal(folder.name, "train", 0, 1, codec, VOCABULARY)
    Teacher(target).predict_step(Work(folder / "train", seal, responses()))
    cache = LogitCache(folder / "train", folder.name)
    return collate([cache[i] for i in range(len(cache))])


def test_labels_masks_and_positions_by_hand_at_turn_borders_and_with_padding(tmp_path):
    target = model(0)
    (tmp_path / "train").mkdir()
    batch = cached(target, tmp_path, TopK(VOCABULARY))
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 0, 0], [9, 10, 33, 12, 0, 0], [1, 2, 3, 4, 11, 35]]
    # The last token of a prompt predicts the first of its response; the last of a response, and padding, predict nothing.
    assert batch.predicts.int().tolist() == [[0, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0]]
    learner = module(build(model(1), DraftConfig(layers=[]), None))
    assert learner.written(batch).tolist() == [7, 8, 10, 33, 12, 35]
    trimmed = module(build(model(1), DraftConfig(layers=[]), KEPT))  # the odd ids: draft id (x − 1) / 2
    assert trimmed.written(batch).tolist() == [3, -1, -1, 16, -1, 17]
    # What each target is the distribution after, read alone and unpadded.
    before = [[5, 6], [5, 6, 7], [9], [9, 10], [9, 10, 33], [1, 2, 3, 4, 11]]
    with torch.no_grad():
        wanted = torch.cat([target(input_ids=torch.tensor([ids])).logits[:, -1] for ids in before]).softmax(-1)
        draft = torch.cat([learner.model(input_ids=torch.tensor([ids])).logits[:, -1] for ids in before]).log_softmax(-1)
        found = losses.support(batch.targets, None)
        torch.testing.assert_close(torch.zeros(6, VOCABULARY).scatter(1, found.ids, found.p), wanted, atol=2e-3, rtol=0)
        torch.testing.assert_close(learner.log_q(batch), draft, atol=1e-5, rtol=1e-5)
    assert float((wanted[:-1] - wanted[1:]).abs().sum(-1).min()) > 0.1  # a shift by one would be seen


def test_a_draft_equal_to_its_target_overlaps_wholly_and_is_always_accepted(tmp_path):
    target = model(0)
    (tmp_path / "train").mkdir()
    draft = build(target, DraftConfig(layers=[]), None)
    batch = cached(target, tmp_path, TopK(VOCABULARY))
    with torch.no_grad():
        overlap = losses.overlap_at_least(module(draft).log_q(batch), losses.support(batch.targets, None))
    torch.testing.assert_close(overlap, torch.ones(6), atol=1e-3, rtol=0)  # the cache rounds to half precision
    for sampling in (Sampling(0.0), Sampling(1.0), Sampling(0.7, top_k=5)):
        done = generate(target, draft, [p for p, _ in TURNS], max_new_tokens=12, num_draft_tokens=3, sampling=sampling, seed=0)
        counts = total(done.acceptance)
        assert counts.accepted == counts.proposed > 20
    other = generate(target, build(model(1), DraftConfig(layers=[]), None), [[5, 6]], max_new_tokens=12, num_draft_tokens=3)
    assert total(other.acceptance).accepted < total(other.acceptance).proposed


@torch.no_grad()
def batches(target, count: int, seed: int) -> list[Batch]:
    """Random texts with the target's own distributions at all positions but the first."""
    made = []
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        tokens = torch.randint(VOCABULARY, (16, 14), generator=generator)
        log_probs, ids = target(input_ids=tokens).logits.log_softmax(-1)[:, :-1].sort(descending=True)
        tail = torch.full((13,), 1e-12).log()
        made.append(collate([Row(t, 1, SparseTargets(i, p, tail)) for t, i, p in zip(tokens, ids, log_probs, strict=True)]))
    return made


def shuffled(batch: Batch, seed: int) -> Batch:
    """The planted fault: every target stands at another position."""
    order = torch.randperm(len(batch.targets.ids), generator=torch.Generator().manual_seed(seed))
    targets = SparseTargets(batch.targets.ids[order], batch.targets.log_probs[order], batch.targets.log_tail[order])
    return replace(batch, targets=targets)


def constant(batch: Batch) -> Tensor:
    """Mean overlap of the target with its own mean distribution, the best that ignores the text."""
    p = torch.zeros(len(batch.targets.ids), VOCABULARY).scatter(1, batch.targets.ids, batch.targets.log_probs.exp())
    return torch.minimum(p, p.mean(0)).sum(-1).mean()


def test_shuffled_targets_do_not_learn(tmp_path):
    target = model(0)
    target.model.norm.weight.data.mul_(3)  # a target that is sure of itself, so that the text tells something
    [held_out] = batches(target, 1, seed=99)
    train = batches(target, 60, seed=0)
    learnt = {}
    for name, given in (("honest", train), ("shuffled", [shuffled(batch, n) for n, batch in enumerate(train)])):
        learner = module(build(target, DraftConfig(layers=[0]), None))
        learner.model.train()
        trainer(tmp_path, max_steps=len(given)).fit(learner, loader(given))
        with torch.no_grad():
            overlap = losses.overlap_at_least(learner.log_q(held_out), losses.support(held_out.targets, None))
        learnt[name] = float(overlap.mean())
    reference = float(constant(held_out))
    assert learnt["shuffled"] < reference + 0.02
    assert learnt["honest"] > reference + 0.1


def test_a_batch_whose_positions_are_all_masked_is_refused(tmp_path):
    [batch] = batches(model(0), 1, seed=0)
    none = batch.targets
    empty = SparseTargets(none.ids[:0], none.log_probs[:0], none.log_tail[:0])
    masked = Batch(batch.tokens, torch.zeros_like(batch.predicts), empty)
    learner = module(build(model(1), DraftConfig(layers=[0]), None))
    with pytest.raises(PipelineError, match="no position that counts, all are masked: give responses of at least one token"):
        trainer(tmp_path, max_steps=1).fit(learner, loader([masked]))


@pytest.mark.parametrize("scale", [1e6, float("nan")])
def test_hidden_states_beyond_half_precision_are_refused_with_another_codec(tmp_path, scale):
    target = model(0)
    target.model.norm.weight.data.fill_(scale)
    with pytest.raises(PipelineError, match=r"^codec\.kind=hidden: a hidden state does not fit .*use codec=topk"):
        cached(target, tmp_path, Hidden(16))
