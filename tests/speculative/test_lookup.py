"""Prompt lookup finds the longest, most recent passage; with it the output is still the target's."""

import pytest
import torch

from speculative import Draft, PromptLookup, Sampling, generate
from speculative.drafters import ModelDrafter
from tests.speculative.laws import chi_square, decode
from tests.speculative.tiny import perturbed, tiny, trimmed

KEPT = torch.tensor([*range(15), *range(15, 48, 3)])
PROMPTS = [[1, 2, 3, 9, 1, 2], [7, 7, 7], [4, 5, 6, 8], [3, 1, 3, 1, 3]]


@pytest.fixture(scope="module")
def target():
    return tiny(dtype=torch.float64)


def look(text, count, longest=3, shortest=1, capacity=20):
    tokens = torch.full((1, capacity), 99)
    tokens[0, : len(text)] = torch.tensor(text)
    proposal = PromptLookup(longest, shortest).propose(tokens, torch.tensor([len(text)]), torch.tensor([0]), count)
    assert proposal.guess.q is None
    return proposal.guess.tokens[0, : int(proposal.counts[0])].tolist()


@pytest.mark.parametrize(
    ("text", "count", "found"),
    [
        ([1, 2, 3, 4, 1, 2], 3, [3, 4, 1]),  # the longest suffix that was there before
        ([1, 2, 5, 9, 2, 6, 1, 2], 2, [5, 9]),  # the longer match, though a shorter one is more recent
        ([2, 5, 9, 2, 6, 8, 2], 2, [6, 8]),  # of equal matches the most recent
        ([1, 2, 3, 4], 3, []),
        ([7], 3, []),
        ([7, 7], 3, [7, 7, 7]),  # a loop goes on
        ([4, 1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),
    ],
)
def test_by_hand(text, count, found):
    assert look(text, count) == found


def test_the_shortest_size_counts():
    assert look([1, 2, 5, 1, 3, 1], 2, shortest=2) == []
    assert look([1, 2, 5, 8, 1, 2], 2, shortest=2) == [5, 8]


def test_scratch_behind_the_text_is_not_text():
    tokens = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    proposal = PromptLookup().propose(tokens, torch.tensor([3]), torch.tensor([0]), 2)
    assert proposal.counts.tolist() == [0]


def test_rows_find_their_own_passages():
    tokens = torch.tensor([[1, 2, 3, 1, 0, 0], [4, 4, 9, 9, 9, 0], [1, 2, 3, 4, 5, 6]])
    proposal = PromptLookup().propose(tokens, torch.tensor([4, 5, 6]), torch.arange(3), 2)
    assert proposal.counts.tolist() == [2, 2, 0]
    assert proposal.guess.tokens[:2].tolist() == [[2, 3], [9, 9]]


@pytest.mark.parametrize(("longest", "shortest"), [(0, 0), (2, 3), (3, 0)])
def test_sizes_out_of_order_are_refused(longest, shortest):
    with pytest.raises(ValueError, match="1 ≤ shortest ≤ longest"):
        PromptLookup(longest, shortest)


@pytest.mark.parametrize("name", ["none", "near", "trimmed"])
def test_greedy_output_is_plain(target, name):
    drafts = {"none": None, "near": Draft(perturbed(target)), "trimmed": Draft(trimmed(KEPT, dtype=torch.float64), KEPT)}
    plain = decode(target, PROMPTS, max_new_tokens=30).tokens
    done = generate(target, drafts[name], PROMPTS, max_new_tokens=30, num_draft_tokens=4, lookup=PromptLookup())
    assert done.tokens == plain
    assert sum(part.accepted for part in done.acceptance) > 0


@pytest.mark.parametrize("verification", ["token", "block", "match"])
@pytest.mark.parametrize("name", ["plain", "trimmed"])
def test_sampled_tokens_follow_the_target_s_law(small, name, verification):
    model, drafts = small
    p_value, rate = chi_square(model, drafts[name], Sampling(1.5), lookup=PromptLookup(2), verification=verification)
    assert p_value > 1e-3
    assert 0.05 < rate < 0.97


def test_the_model_rests_while_all_rows_match(target, monkeypatch):
    calls = []
    real = ModelDrafter.propose
    monkeypatch.setattr(ModelDrafter, "propose", lambda self, *a: calls.append(1) or real(self, *a))
    loops = [[7, 8, 7, 8, 7, 8]]
    options = {"max_new_tokens": 12, "num_draft_tokens": 3}
    done = generate(target, Draft(perturbed(target)), loops, lookup=PromptLookup(), **options)
    assert len(calls) < sum(part.target_forwards for part in done.acceptance)
    assert done.tokens == decode(target, loops, max_new_tokens=12).tokens
