"""Held-out agreement is what decoding would see: one for the target itself, argmax agreement at temperature 0."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from data.responses import Request, Response
from pipeline import tiny
from pipeline.config import Draft as DraftConfig
from pipeline.draft import build
from pipeline.held_out import HeldOut, by_kind, measure, of_split
from speculative import Draft, Sampling

KEPT = torch.arange(0, 259, 2)
TEXTS = [((5, 9, 200), (3, 4, 4, 100)), ((77,), (50,)), ((1, 2), (258, 0, 33, 34, 35, 36))]
SAMPLINGS = [Sampling(0.0), Sampling(1.0), Sampling(0.6, top_k=20), Sampling(1.3, top_p=0.9)]


def response(key: int, prompt: tuple[int, ...], tokens: tuple[int, ...], split: str = "test", temperature: float = 1.0):
    return Response(Request(key, split, f"p{key}", "write", temperature, prompt), tokens, stopped=False)


RESPONSES = [response(key, prompt, tokens) for key, (prompt, tokens) in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> PreTrainedModel:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.make(folder, seed=0)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def predicted(model: PreTrainedModel, one: Response) -> torch.Tensor:
    """Logits of the positions that predict the response, from the plain forward pass."""
    ids = torch.tensor([one.request.prompt + one.tokens])
    return model(input_ids=ids).logits[0, len(one.request.prompt) - 1 : -1]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_target_as_its_own_draft_is_always_accepted(target, sampling):
    [found] = measure(target, [Draft(target)], RESPONSES, sampling, "")
    assert [len(values) for values in found.acceptance] == [4, 1, 6]
    assert found.positions == 11
    assert all(value == pytest.approx(1.0, abs=1e-5) for values in found.acceptance for value in values)
    assert found.overlap == pytest.approx(1.0, abs=1e-5)
    assert found.means["top1"] == pytest.approx(1.0)
    assert found.means["vocabulary_mass"] == pytest.approx(1.0, abs=1e-5)
    for name in ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation"):
        assert found.means[name] == pytest.approx(0.0, abs=1e-5)


def test_acceptance_at_temperature_0_is_argmax_agreement(target):
    draft = build(target, DraftConfig(layers=[0]), KEPT)
    [found] = measure(target, [draft], RESPONSES, Sampling(0.0), "")
    expected = []
    for one in RESPONSES:
        best = KEPT[predicted(draft.model, one).argmax(-1)]
        expected.append((predicted(target, one).argmax(-1) == best).float().tolist())
    assert found.acceptance == expected
    assert found.overlap == pytest.approx(found.means["top1"])


def test_a_greedy_draft_is_now_right_and_now_wrong(target):
    # Half of the vocabulary at full depth: right exactly where the target's best id is one the draft has.
    draft = build(target, DraftConfig(layers=[]), KEPT)
    long = [response(0, (5,), tuple(range(20, 120)))]
    [found] = measure(target, [draft], long, Sampling(0.0), "")
    assert found.acceptance == [(predicted(target, long[0]).argmax(-1) % 2 == 0).float().tolist()]
    assert set(found.acceptance[0]) == {0.0, 1.0}


def test_acceptance_of_sampling_is_the_sum_of_minima_at_that_temperature(target):
    draft = build(target, DraftConfig(layers=[0]), KEPT)
    [found] = measure(target, [draft], RESPONSES, Sampling(0.5), "")
    for values, one in zip(found.acceptance, RESPONSES, strict=True):
        p = (predicted(target, one).double() / 0.5).softmax(-1)
        q = torch.zeros_like(p)
        q[:, KEPT] = (predicted(draft.model, one).double() / 0.5).softmax(-1)
        assert values == pytest.approx(torch.minimum(p, q).sum(-1).tolist(), abs=1e-5)
    assert found.means["overlap"] == pytest.approx(found.overlap, abs=1e-5)  # no filter: the two measures are one
    assert 0 < found.overlap < 0.99


def test_several_drafts_are_measured_as_if_alone(target):
    drafts = [build(target, DraftConfig(layers=layers), ids) for layers, ids in (([0], None), ([0, -1], KEPT))]
    together = measure(target, drafts, RESPONSES, Sampling(1.0), "")
    alone = [measure(target, [draft], RESPONSES, Sampling(1.0), "")[0] for draft in drafts]
    assert together == alone
    assert alone[0].acceptance != alone[1].acceptance


def test_only_written_responses_of_the_split_and_temperature_count():
    wanted = response(1, (1,), (2,))
    others = [
        response(2, (1,), ()),
        response(3, (1,), (2,), split="validation"),
        response(4, (1,), (2,), temperature=0.0),
    ]
    assert of_split([*others, wanted], "test", 1.0) == [wanted]


def test_overlap_by_kind_counts_the_positions_of_its_own_answers():
    answers = [
        Response(Request(key, "test", f"p{key}", kind, 1.0, (1,)), (2,) * count, False)
        for key, (kind, count) in enumerate((("rare", 1), ("often", 2), ("often", 3)))
    ]
    chances = [[0.5], [0.0, 1.0], [0.0, 0.5, 0.6]]
    found = by_kind(HeldOut(chances, {}, 6, [[]] * 3), answers)
    assert list(found.items()) == [
        ("often", {"overlap": pytest.approx(0.42), "positions": 5}),
        ("rare", {"overlap": 0.5, "positions": 1}),
    ]
    # Heads have no draft of an answer's first token.
    found = by_kind(HeldOut([[0.0], *chances[1:]], {}, 3, [[]] * 3, by_head=[{}]), answers)
    assert found == {"often": {"overlap": pytest.approx(0.7), "positions": 3}}
