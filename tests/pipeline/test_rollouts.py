"""What a draft continues: every branch reads as the text it stands for, and weighs as decoding comes to it."""

from dataclasses import replace

import pytest
import torch

from data.batching import LengthGroupedBatches, Mixed, collate
from data.branches import Branched, beside
from data.logit_cache import Row
from data.responses import Request, Response
from data.targets import DenseTargets
from pipeline.config import Objective, Optimizer
from pipeline.errors import PipelineError
from pipeline.forward import read_branches
from pipeline.module import Distillation
from pipeline.rollouts import Roller
from speculative import Draft, Sampling
from speculative.cost import Costs
from speculative.sampling import probabilities
from tests.speculative.tiny import tiny

SIZE, IDS = 48, 44  # rows of the tiny models' heads, and the tokens among them
KEPT = torch.arange(0, IDS, 2)
COSTS = Costs(plain_seconds=1.0, draft=0.1, verify=(1.0,) * 4, other=(0.0,) * 4)


def answers(temperature: float) -> list[Response]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for key, (prompt, response) in enumerate(((3, 9), (5, 4), (2, 12), (6, 7), (4, 1))):
        ids = tuple(torch.randint(IDS, (prompt + response,), generator=generator).tolist())
        made.append(Response(Request(key, "train", "", "", temperature, ids[:prompt]), ids[prompt:], False))
    return made


def trimmed(seed: int = 5) -> Draft:
    model = tiny("llama", seed=seed)
    head = torch.nn.Linear(model.config.hidden_size, len(KEPT), bias=False)
    head.weight.data = model.get_output_embeddings().weight.data[KEPT].clone()
    model.set_output_embeddings(head)
    return Draft(model, KEPT)


def alone(model, text: list[int]) -> torch.Tensor:
    """The oracle: logits behind ``text``, by a plain forward over it."""
    return model(input_ids=torch.tensor([text])).logits[0, -1]


@torch.inference_mode()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "gemma"])
def test_a_branch_reads_as_its_text(kind, implementation):
    model = tiny(kind, implementation=implementation)
    trunks, branches = [[1, 2, 3, 4, 5], [6, 7]], [[(2, [8, 9]), (5, [10])], [(1, [11, 12, 13])]]
    logits = read_branches(model, beside(trunks, branches), hidden=False)
    for row, (trunk, leaving) in enumerate(zip(trunks, branches, strict=True)):
        texts = [trunk[: end + 1] for end in range(len(trunk))]
        texts += [[*trunk[:cut], *branch[: end + 1]] for cut, branch in leaving for end in range(len(branch))]
        for place, text in enumerate(texts):
            torch.testing.assert_close(logits[row, place], alone(model, text), atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("hidden", [False, True])
def test_rolled_answers(temperature, hidden):
    target, draft, batch = tiny("llama", seed=1), trimmed(), answers(temperature)
    found = Roller(draft, starts=3, length=2, seed=7).roll(target, batch, hidden, IDS)
    sampling = Sampling(temperature)
    for rolled, response in zip(found, batch, strict=True):
        trunk = [*response.request.prompt, *response.tokens]
        assert rolled.tokens[: rolled.start] == trunk
        assert len(rolled.cuts) == 2 * min(3, len(response.tokens)) == len(rolled.survival) == len(rolled.outputs)
        cuts = rolled.cuts[::2].tolist()
        assert cuts == sorted(set(cuts))
        assert all(len(response.request.prompt) <= cut < len(trunk) for cut in cuts)
        for place, cut in enumerate(cuts):
            text, survival = trunk[:cut], 1.0
            for step in range(2):
                token = rolled.tokens[rolled.start + 2 * place + step]
                q = probabilities(alone(draft.model, text)[None].float(), sampling)[0]
                p = probabilities(alone(target, text)[None, :IDS].float(), sampling)[0]
                assert token in KEPT.tolist()
                survival *= min(1.0, float(p[token] / q[KEPT.tolist().index(token)]))
                text = [*text, token]
                assert float(rolled.survival[2 * place + step]) == pytest.approx(survival, rel=1e-3, abs=1e-6)
                output = rolled.outputs[2 * place + step]
                after = target.get_output_embeddings()(output) if hidden else output
                torch.testing.assert_close(after, alone(target, text), atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_branch_does_not_depend_on_its_batch():
    target, draft, batch = tiny("llama", seed=1), trimmed(), answers(1.0)
    roller = Roller(draft, starts=2, length=3, seed=7)
    together = roller.roll(target, batch, False, IDS)
    for place, response in enumerate(batch):
        [single] = roller.roll(target, [response], False, IDS)
        assert single.tokens == together[place].tokens
        assert torch.equal(single.cuts, together[place].cuts)
    others = [rolled.tokens for rolled in replace(roller, seed=8).roll(target, batch, False, IDS)]
    assert others != [rolled.tokens for rolled in together]


@torch.inference_mode()
def test_drafts_are_drawn_from_the_draft():
    """Over many answers to one prompt the first tokens of branches have the draft's distribution."""
    draft, target = trimmed(), tiny("llama", seed=1)
    batch = [Response(Request(key, "train", "", "", 1.0, (1, 2, 3)), (4,), False) for key in range(3000)]
    found = Roller(draft, starts=1, length=1, seed=0).roll(target, batch, True, IDS)
    counts = torch.bincount(torch.tensor([rolled.tokens[rolled.start] for rolled in found]), minlength=IDS)[KEPT].double()
    expected = 3000 * alone(draft.model, [1, 2, 3]).double().softmax(-1)
    usual = expected >= 5
    statistic = float(((counts - expected) ** 2 / expected)[usual].sum())
    degrees = int(usual.sum())
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5


def test_a_model_that_sees_all_that_stands_before_is_refused():
    layout = beside([[1, 2, 3]], [[(1, [4])]])
    with pytest.raises(PipelineError, match=r"regime\.kind=rollouts: bloom cannot read several continuations"):
        read_branches(tiny("bloom"), layout, False)


def branched_rows(draft: Draft) -> list[Row]:
    target = tiny("llama", seed=1)
    rolled = Roller(draft, starts=3, length=2, seed=7).roll(target, answers(1.0), False, IDS)
    found = [(r, DenseTargets(r.outputs.float().log_softmax(-1))) for r in rolled]
    return [Row(torch.tensor(r.tokens), r.start, targets, r.cuts, r.survival) for r, targets in found]


def module(draft: Draft) -> Distillation:
    found = Distillation(draft, SIZE, Objective(), Optimizer(), 1, {}, COSTS)
    found.log = lambda *given, **options: None
    return found


def test_a_batch_of_branches():
    batch = collate(rows := branched_rows(trimmed()))
    assert int(batch.predicts.sum()) == sum(len(row.tokens) - row.start for row in rows) == len(batch.weights)
    assert batch.tokens[batch.predicts].tolist() == [token for row in rows for token in row.tokens[row.start :].tolist()]
    assert batch.weights.tolist() == [weight for row in rows for weight in row.survival.tolist()]
    moved = batch.to(torch.device("meta"))
    assert {t.device.type for t in (moved.tokens, moved.branched.cuts, moved.branched.positions, moved.weights)} == {"meta"}


def test_the_loss_is_the_mean_over_branches_by_survival():
    """The oracle: a plain forward over the text of each branch token, KL in the draft's ids."""
    draft = trimmed()
    rows = branched_rows(draft)
    loss = module(draft).training_step(collate(rows), 0)
    total = weight = 0.0
    for row in rows:
        trunk, branches = row.tokens[: row.start].tolist(), row.tokens[row.start :].view(-1, 2).tolist()
        for place, branch in enumerate(branches):
            for step in range(2):
                index = 2 * place + step
                text = [*trunk[: int(row.cuts[index])], *branch[: step + 1]]
                log_q = alone(draft.model, text).log_softmax(-1)
                p = row.targets.log_probs[index, KEPT].exp()
                p = p / p.sum()
                total += float(row.survival[index]) * float((p * (p.log() - log_q)).sum())
                weight += float(row.survival[index])
    assert loss.item() == pytest.approx(total / weight, rel=1e-4)
    loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in draft.model.parameters() if p.grad is not None)


def test_a_mask_that_lets_branches_see_each_other_is_noticed(monkeypatch):
    draft = trimmed()
    rows = branched_rows(draft)
    right = module(draft).training_step(collate(rows), 0).item()
    causal = lambda self: torch.ones(len(self.tokens), 1, *[self.tokens.shape[1]] * 2).tril().bool()  # noqa: E731
    monkeypatch.setattr(Branched, "mask", causal)
    assert abs(module(draft).training_step(collate(rows), 0).item() - right) > 1e-3


def test_a_batch_that_no_round_comes_to_teaches_nothing():
    draft = trimmed()
    rows = [replace(row, survival=torch.zeros_like(row.survival)) for row in branched_rows(draft)]
    loss = module(draft).training_step(collate(rows), 0)
    loss.backward()
    assert loss.item() == 0
    assert all(not bool(p.grad.any()) for p in draft.model.parameters() if p.grad is not None)


def test_a_share_of_the_batches_and_the_same_after_a_break():
    def order(start: int = 0) -> list[list[int]]:
        return list(Mixed(*(LengthGroupedBatches([3] * rows, 4, 40, 0) for rows in (20, 12)), 20, 0.3, start))

    whole = order()
    assert len(whole) == 40
    second = [all(row >= 20 for row in batch) for batch in whole]
    assert sum(second) == 12
    assert all(max(batch) < 20 for batch, turn in zip(whole, second, strict=True) if not turn)
    assert max(len(run) for run in "".join("x" if turn else " " for turn in second).split("x")) <= 3
    assert order(start=17) == whole[17:]
