"""Objectives are least where q is p, sparse ones are bounds, dense ones are sparse ones with every id, and all stay finite."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from data.targets import DenseTargets, SparseTargets
from pipeline import losses
from pipeline.losses import Support, support
from tests.pipeline.test_gradients import OBJECTIVES, TEXTBOOK, each, mixture
from tests.pipeline.test_losses import draft_ids, noise, row, stored

BOUNDS = [name for name in OBJECTIVES if name != "hybrid"]
cases = given(st.integers(2, 20), st.integers(1, 20), st.integers(0, 10_000), st.booleans())


def case(vocabulary: int, k: int, seed: int, trimmed: bool) -> tuple[Support, Tensor, Tensor]:
    """Random targets of four positions, a random draft, and the p that the draft can express (log)."""
    p = noise(4, vocabulary, seed)
    kept = list(range(0, vocabulary, 2)) if trimmed else list(range(vocabulary))
    target = support(stored(p, min(k, vocabulary)), draft_ids(kept, vocabulary) if trimmed else None)
    return target, noise(4, len(kept), seed + 1).log_softmax(-1), p[:, kept].log_softmax(-1)


@settings(deadline=None, max_examples=30)
@cases
def test_nothing_is_below_q_equal_to_p(vocabulary, k, seed, trimmed):
    k = vocabulary if trimmed else k  # what share of a tail a trimmed draft could say is unknown, so q = p is too
    target, log_q, log_p = case(vocabulary, k, seed, trimmed)
    for name, function in OBJECTIVES.items():
        z = log_p.clone().requires_grad_()
        least = function(z.log_softmax(-1), target)
        torch.testing.assert_close(least, torch.zeros_like(least), atol=1e-6, rtol=0, msg=name)
        [gradient] = torch.autograd.grad(least.sum(), z)
        # Total variation has a corner there; the gradient is one of its slopes, and may be as large as q.
        if not name.startswith(("total", "overlap", "hybrid")):
            torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-6, rtol=0, msg=name)
        for share in (0.01, 0.3, 1.0):
            near = ((1 - share) * log_p.exp() + share * log_q.exp()).log()
            assert bool((function(near, target) >= least - 1e-7).all()), name


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 20), st.integers(1, 20), st.integers(0, 10_000))
def test_sparse_values_are_lower_bounds_that_rise_with_k(vocabulary, k, seed):
    # An untrimmed draft: the bound is one where the draft has the ids of the tail.
    p, log_q = noise(4, vocabulary, seed), noise(4, vocabulary, seed + 1).log_softmax(-1)
    k = min(k, vocabulary)
    for name in BOUNDS:
        few, more = (OBJECTIVES[name](log_q, support(stored(p, n), None)) for n in (k, min(k + 3, vocabulary)))
        exact = TEXTBOOK[name](p.softmax(-1), log_q.exp())
        assert bool((few <= more + 1e-6).all()), name
        assert bool((more <= exact + 1e-6).all()), name
    short = TEXTBOOK["total_variation"](p.softmax(-1), log_q.exp()) - losses.total_variation(log_q, support(stored(p, k), None))
    assert bool((short <= stored(p, k).log_tail.exp() + 1e-6).all())


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 20), st.integers(1, 20), st.integers(0, 10_000), st.sampled_from([0.2, 0.5, 0.9]))
def test_jensen_shannon_falls_short_by_no_more_than_it_says(vocabulary, k, seed, beta):
    p, log_q = noise(4, vocabulary, seed), noise(4, vocabulary, seed + 1).log_softmax(-1)
    targets = stored(p, min(k, vocabulary))
    found = losses.jensen_shannon(log_q, support(targets, None), beta)
    short = mixture(beta)(p.softmax(-1), log_q.exp()) - found
    tail = targets.log_tail.exp()
    rest = 1 - log_q.exp().gather(1, targets.ids).sum(-1)
    most = torch.where(tail > 0, beta * tail * (1 + torch.log1p((1 - beta) * rest / (beta * tail))), 0.0)
    assert bool((short <= most + 1e-6).all())


@settings(deadline=None, max_examples=30)
@cases
def test_dense_equals_sparse_with_every_id_stored(vocabulary, k, seed, trimmed):
    p = noise(4, vocabulary, seed)
    ids = draft_ids(list(range(0, vocabulary, 2)), vocabulary) if trimmed else None
    whole, dense = support(stored(p, vocabulary), ids), support(DenseTargets(p.log_softmax(-1)), ids)
    log_q = noise(4, int((ids >= 0).sum()) if trimmed else vocabulary, seed + 1).log_softmax(-1)
    assert dense.ids.shape == (4, 1 + log_q.shape[1])  # the best id, and all that the draft has
    for name, function in OBJECTIVES.items():
        torch.testing.assert_close(function(log_q, dense), function(log_q, whole), atol=1e-7, rtol=1e-7, msg=name)
    torch.testing.assert_close(losses.overlap_at_least(log_q, dense), losses.overlap_at_least(log_q, whole))
    assert torch.equal(losses.top1(log_q, dense), losses.top1(log_q, whole))
    # A draft that has the target's best id, and says so, is right in both.
    best = torch.nn.functional.one_hot(dense.ids[:, 0], log_q.shape[1]).double().mul(9).log_softmax(-1)
    assert torch.equal(losses.top1(best, dense), (dense.p[:, 0] > 0).float())


INFINITE = -math.inf
EXTREMES = {
    "one-hot p": SparseTargets(torch.tensor([[1, 0]]), torch.tensor([[0.0, INFINITE]]), torch.tensor([INFINITE])),
    "no tail": SparseTargets(torch.tensor([[1, 0]]), torch.tensor([[0.75, 0.25]]).log(), torch.tensor([INFINITE])),
    "nearly all tail": SparseTargets(torch.tensor([[2]]), torch.tensor([[1e-6]]).log(), torch.tensor([1 - 1e-6]).log()),
    "nothing the draft has": SparseTargets(torch.tensor([[3, 3]]), torch.tensor([[0.0, -90.0]]), torch.tensor([INFINITE])),
    "below float32": SparseTargets(torch.tensor([[1, 2]]), torch.tensor([[0.0, -110.0]]), torch.tensor([-110.0])),
}
DRAFTS = {
    "certain of a stored id": [0.0, 300.0, 0.0],
    "certain of another": [300.0, 0.0, 0.0],
    "certain beyond float32's range of exp": [1e4, -1e4, 0.0],
    "even": [0.0, 0.0, 0.0],
}


@each
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("dense", [False, True])
def test_value_and_gradient_are_finite_at_the_extremes(name, extreme, dense):
    target = support(EXTREMES[extreme], draft_ids([0, 1, 2], 4))
    if dense:
        whole = torch.full((1, 4), INFINITE).scatter(1, EXTREMES[extreme].ids, EXTREMES[extreme].log_probs)
        target = support(DenseTargets(whole), draft_ids([0, 1, 2], 4))
    for draft in DRAFTS.values():
        q = torch.tensor([draft], requires_grad=True)
        value = OBJECTIVES[name](q.log_softmax(-1), target)
        value.sum().backward()
        assert value.dtype == torch.float32
        assert torch.isfinite(value).all(), draft
        assert torch.isfinite(q.grad).all(), draft


@each
def test_a_position_of_which_the_draft_can_say_nothing_teaches_nothing(name):
    q = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    value = OBJECTIVES[name](q.log_softmax(-1), support(EXTREMES["nothing the draft has"], draft_ids([0, 1, 2], 4)))
    value.sum().backward()
    assert value.item() == pytest.approx(0.0, abs=1e-6)
    assert q.grad.tolist() == [[0.0, 0.0, 0.0]]


@each
@pytest.mark.parametrize("broken", ["log_probs", "log_tail", "log_q"])
def test_what_is_not_a_number_stays_visible(name, broken):
    parts = {"log_probs": row(0.5, 0.25).log(), "log_tail": row(0.25).log()[0], "log_q": row(0.5, 0.3, 0.2).log()}
    parts[broken] = parts[broken].clone().fill_(math.nan)
    target = support(SparseTargets(torch.tensor([[2, 0]]), parts["log_probs"], parts["log_tail"]), None)
    assert math.isnan(OBJECTIVES[name](parts["log_q"], target).item())


def test_a_draft_far_from_its_target_is_pushed_by_log_overlap_and_not_by_total_variation():
    # q of the target's only id is e⁻¹²⁰, which float32 rounds to zero.
    target = support(EXTREMES["one-hot p"], None)
    gradients = []
    for function in (losses.negative_log_overlap, losses.total_variation):
        q = torch.tensor([[120.0, 0.0, 0.0]], requires_grad=True)
        function(q.log_softmax(-1), target).sum().backward()
        gradients.append(q.grad)
    torch.testing.assert_close(gradients[0], torch.tensor([[1.0, -1.0, 0.0]]))
    torch.testing.assert_close(gradients[1], torch.zeros(1, 3), atol=1e-6, rtol=0)
