"""Validation by hand: means and slices of positions, and a predicted ratio that is that of the cost model."""

import math
import re

import pytest
import torch
from mlflow.utils.validation import _validate_metric_name

from data.targets import SparseTargets
from pipeline.losses import support
from pipeline.validation import KINDS, HeadTally, Tally, entropy, metric_names
from speculative.cost import Costs, best_length
from tests.pipeline.test_losses import draft_ids, row

FREE = Costs(plain_seconds=1.0, draft=0.1, verify=(1.0,) * 4, other=(0.0,) * 4)


def targets(*best: float) -> SparseTargets:
    """The target gives id 0 the probability ``best`` and id 1 the rest, at each position."""
    p = torch.tensor([[b, 1 - b] for b in best], dtype=torch.float64)
    return SparseTargets(torch.tensor([[0, 1]] * len(best)), p.log(), torch.full((len(best),), -math.inf))


def log_q(*best: float) -> torch.Tensor:
    return torch.tensor([[b, 1 - b] for b in best], dtype=torch.float64).log()


def test_means_divide_sums_by_counts_over_batches_of_different_size():
    tally = Tally(greedy=False)
    tally.add(log_q(0.5, 0.25, 0.9), support(targets(0.5, 0.75, 0.9), None), [1, 2], ["a", "a"])
    tally.add(log_q(0.6), support(targets(0.8), None), [1], ["a"])
    found = tally.means()
    assert found["overlap"] == pytest.approx((1 + 0.5 + 1 + 0.8) / 4)
    assert found["top1"] == pytest.approx(3 / 4)
    divergence = 0.75 * math.log(3) + 0.25 * math.log(1 / 3) + 0.8 * math.log(4 / 3) + 0.2 * math.log(0.5)
    assert found["forward_kl"] == pytest.approx(divergence / 4, abs=1e-6)


def test_slices_go_by_place_within_each_response_and_by_entropy():
    tally = Tally(greedy=False)
    # Two responses of 17 tokens: only their last one is beyond the first 16.
    p, q = [0.5] * 16 + [0.99], [0.5] * 16 + [0.49]
    tally.add(log_q(*q, *q), support(targets(*p, *p), None), [17, 17], ["a", "a"])
    found = tally.means()
    assert found["overlap_position_0"] == pytest.approx(1.0)
    assert found["overlap_position_16"] == pytest.approx(0.5)
    assert "overlap_position_64" not in found
    assert found["overlap_entropy_0"] == pytest.approx(0.5)  # of 0.99: 0.056 nats
    assert found["overlap_entropy_0.5"] == pytest.approx(1.0)  # of ½: ln 2
    assert "overlap_entropy_2" not in found


def test_slices_by_kind_of_prompt_divide_by_their_own_positions():
    tally = Tally(greedy=False)
    tally.add(log_q(0.5, 0.25, 0.9), support(targets(0.5, 0.75, 0.9), None), [2, 1], ["write a test", "explain"])
    tally.add(log_q(0.6), support(targets(0.8), None), [0, 1], ["none of these", "write a test"])
    found = {name: value for name, value in tally.means().items() if "kind" in name}
    assert found == pytest.approx({"overlap_kind_write_a_test": (1 + 0.5 + 0.8) / 3, "overlap_kind_explain": 1.0})


def test_of_many_kinds_those_with_the_most_positions_have_a_slice():
    tally = Tally(greedy=False)
    for number in range(KINDS + 2):
        count = 2 if number else 1  # the first is the rarest; of the others the last by name is left out
        tally.add(log_q(*[0.5] * count), support(targets(*[0.5] * count), None), [count], [f"kind {number}"])
    assert {name for name in tally.means() if "kind" in name} == {f"overlap_kind_kind_{n}" for n in range(1, KINDS + 1)}


def test_heads_are_sliced_by_kind_as_the_first_of_them_is():
    tally = HeadTally([Tally(True), Tally(True)])
    tally.add(1, log_q(0.9, 0.9, 0.4), support(targets(0.9, 0.9, 0.9), None), [3, 2], ["a", "b"])
    tally.add(2, log_q(0.1), support(targets(0.9), None), [3, 2], ["a", "b"])
    found = tally.means()
    assert (found["overlap_kind_a"], found["overlap_kind_b"]) == pytest.approx((1.0, 0.5))


def test_whatever_a_kind_is_called_its_metric_has_a_name_that_stores_take():
    kinds = ["a b", "a/b", "", "..", "翻译", "问题", "x" * 300, "code: C++", "a.b"]
    names = metric_names(kinds)
    assert len(set(names)) == len(kinds)
    for name in names:
        whole = f"validation-1/overlap_kind_{name}"
        _validate_metric_name(whole)
        assert re.fullmatch(r"[A-Za-z0-9_/. -]{1,250}", whole), "Lightning's logger drops other characters"
    assert names[-2:] == ["code_C", "a.b"]
    assert all(re.fullmatch(r"a_b_[0-9a-f]{6}", name) for name in names[:2])


def test_entropy_counts_all_that_is_not_known_as_one_outcome():
    half = SparseTargets(torch.tensor([[0, 1]]), row(0.5, 0.25).log(), row(0.25).log()[0])
    assert entropy(support(half, None)).item() == pytest.approx(1.5 * math.log(2))
    assert entropy(support(half, draft_ids([0], 2))).item() == pytest.approx(math.log(2))
    sure = SparseTargets(torch.tensor([[0, 1]]), torch.tensor([[0.0, -math.inf]]), torch.tensor([-math.inf]))
    assert entropy(support(sure, None)).item() == 0.0


def test_the_ratio_is_that_of_the_cost_model_on_overlap_or_on_greedy_agreement():
    sampled, greedy = Tally(greedy=False), Tally(greedy=True)
    for tally in (sampled, greedy):
        tally.add(log_q(0.5, 0.25, 0.9), support(targets(0.5, 0.75, 0.9), None), [1, 2], ["a", "a"])
    # The draft of a text's last token is not needed. K = 1: 1 round for the first text; for the second 1.5, or 2 if the
    # first of its drafts is never accepted. A round costs 1.1.
    assert sampled.ratio(FREE) == pytest.approx(3 / (2.5 * 1.1))
    assert greedy.ratio(FREE) == pytest.approx(3 / (3 * 1.1))


def test_the_best_length_is_taken():
    tally = Tally(greedy=True)
    tally.add(log_q(*[0.9] * 12), support(targets(*[0.9] * 12), None), [12], ["a"])
    assert tally.ratio(FREE) == pytest.approx(best_length([[1.0] * 12], FREE)[1]) == pytest.approx(12 / (3 * 1.3))


def test_a_draft_that_is_not_worth_its_cost_still_has_a_rank():
    ratios = []
    for best in (0.1, 0.2, 0.3):
        tally = Tally(greedy=False)
        tally.add(log_q(best, best), support(targets(1.0, 1.0), None), [2], ["a"])
        ratios.append(tally.ratio(Costs(plain_seconds=1.0, draft=0.8, verify=(1.0,) * 4, other=(0.0,) * 4)))
    # K = 1: two tokens in 2 − best rounds of 1.8 each.
    assert ratios == pytest.approx([2 / ((2 - best) * 1.8) for best in (0.1, 0.2, 0.3)])
    assert max(ratios) < 1
