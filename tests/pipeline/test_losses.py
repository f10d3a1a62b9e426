"""The objective is the divergence it claims to be, its gradient is q − p, and stored overlap never promises too much."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.targets import SparseTargets
from pipeline.losses import Support, forward_kl, overlap_at_least, support, top1
from speculative.alignment import agreement


def noise(positions: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(positions, vocabulary, generator=generator, dtype=torch.float64) * 2


def stored(logits: torch.Tensor, k: int) -> SparseTargets:
    """What the cache would hold, but without rounding."""
    values, ids = logits.log_softmax(-1).topk(k)
    tail = logits.softmax(-1).scatter(1, ids, 0.0).sum(-1)
    return SparseTargets(ids, values, tail.log())


def draft_ids(vocabulary: list[int], size: int) -> torch.Tensor:
    ids = torch.full((size,), -1)
    ids[torch.tensor(vocabulary)] = torch.arange(len(vocabulary))
    return ids


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_forward_kl_is_the_closed_form_on_full_support():
    p, q = noise(6, 11), noise(6, 11, seed=1)
    exact = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)
    torch.testing.assert_close(forward_kl(q.log_softmax(-1), support(stored(p, 11), None)), exact)


def test_the_gradient_is_q_minus_p_on_full_support():
    p, q = noise(6, 11), noise(6, 11, seed=1).requires_grad_()
    forward_kl(q.log_softmax(-1), support(stored(p, 11), None)).sum().backward()
    torch.testing.assert_close(q.grad, (q.softmax(-1) - p.softmax(-1)).detach())


def test_the_gradient_is_q_minus_p_renormalised_on_a_trimmed_vocabulary():
    kept = [0, 2, 3, 7, 10]
    p, q = noise(6, 11), noise(6, 5, seed=1).requires_grad_()
    forward_kl(q.log_softmax(-1), support(stored(p, 11), draft_ids(kept, 11))).sum().backward()
    inside = p.softmax(-1)[:, kept]
    torch.testing.assert_close(q.grad, (q.softmax(-1) - inside / inside.sum(-1, keepdim=True)).detach())


@pytest.mark.parametrize("k", [1, 3, 11])
def test_equal_distributions_have_no_divergence_and_no_gradient(k):
    q = noise(6, 11).requires_grad_()
    loss = forward_kl(q.log_softmax(-1), support(stored(q.detach(), k), None))
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), torch.zeros(6, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(q.grad, torch.zeros_like(q.grad), atol=1e-12, rtol=0)


def test_the_tail_is_one_outcome_by_hand():
    # p: ½ on id 2, ¼ on id 0, ¼ on "any other"; q: ¼ on id 2, ½ on id 0, ⅛ + ⅛ on the others.
    targets = SparseTargets(torch.tensor([[2, 0]]), row(0.5, 0.25).log(), row(0.25).log()[0])
    q = row(0.5, 0.125, 0.25, 0.125).log().requires_grad_()
    loss = forward_kl(q.log_softmax(-1), support(targets, None))
    # ½·ln 2 + ¼·ln ½ + ¼·ln 1
    assert loss.item() == pytest.approx(0.25 * math.log(2))
    loss.backward()
    # The tail's ¼ is shared out as q shares its own tail.
    torch.testing.assert_close(q.grad, row(0.5 - 0.25, 0.125 - 0.125, 0.25 - 0.5, 0.125 - 0.125))


def test_the_tail_pulls_mass_out_of_the_stored_ids():
    targets = SparseTargets(torch.tensor([[0]]), row(0.6).log(), row(0.4).log()[0])
    q = row(0.9, 0.05, 0.05).log().requires_grad_()
    forward_kl(q.log_softmax(-1), support(targets, None)).backward()
    torch.testing.assert_close(q.grad, row(0.9 - 0.6, 0.05 - 0.2, 0.05 - 0.2))


def test_a_trimmed_vocabulary_by_hand():
    # The draft has ids 1 and 3 of 4. p: ½ on id 0, ¼ on id 1, ¼ elsewhere; restricted: ½ on id 1, ½ elsewhere.
    targets = SparseTargets(torch.tensor([[0, 1]]), row(0.5, 0.25).log(), row(0.25).log()[0])
    translated = support(targets, draft_ids([1, 3], 4))
    torch.testing.assert_close(translated.p, row(0.0, 0.25))
    assert translated.tail.item() == pytest.approx(0.25)
    assert translated.ids[0, 1] == 0
    assert forward_kl(row(0.5, 0.5).log(), translated).item() == pytest.approx(0.0, abs=1e-12)
    q = row(0.25, 0.75).log().requires_grad_()
    loss = forward_kl(q.log_softmax(-1), translated)
    assert loss.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    loss.backward()
    torch.testing.assert_close(q.grad, row(-0.25, 0.25))
    # Overlap counts against the whole p: only ¼ of it can be met on stored ids.
    assert overlap_at_least(row(0.5, 0.5).log(), translated).item() == pytest.approx(0.25)


def test_every_number_stays_finite_where_the_draft_has_no_stored_id():
    targets = SparseTargets(torch.tensor([[0, 2]]), row(0.7, 0.3).log().float(), torch.tensor([1e-12]).log())
    q = torch.tensor([[5.0, -5.0]], requires_grad=True)
    loss = forward_kl(q.log_softmax(-1), support(targets, draft_ids([1, 3], 4)))
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(q.grad).all()


def test_a_draft_certain_of_stored_ids_gets_a_finite_push():
    targets = SparseTargets(torch.tensor([[0]]), torch.tensor([[0.5]]).log(), torch.tensor([0.5]).log())
    q = torch.tensor([[200.0, 0.0]], requires_grad=True)
    loss = forward_kl(q.log_softmax(-1), support(targets, None))
    loss.sum().backward()
    assert 1 < loss.item() < 100
    assert torch.isfinite(q.grad).all()


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 30), st.integers(1, 30), st.integers(0, 1000), st.booleans())
def test_stored_overlap_is_a_lower_bound_and_exact_on_full_support(vocabulary, k, seed, trimmed):
    k = min(k, vocabulary)
    p = noise(4, vocabulary, seed)
    kept = list(range(0, vocabulary, 2)) if trimmed else None
    q = noise(4, len(kept) if kept else vocabulary, seed + 1)
    target = support(stored(p, k), draft_ids(kept, vocabulary) if kept else None)
    bound = overlap_at_least(q.log_softmax(-1), target)
    dense = agreement(p, q, torch.tensor(kept) if kept else None).overlap.double()
    assert bool((bound <= dense + 1e-6).all())
    assert bool((dense <= bound + target.tail + 1e-6).all())
    if k == vocabulary:
        torch.testing.assert_close(bound, dense, atol=1e-6, rtol=0)


def test_stored_overlap_falls_short_where_the_tail_overlaps():
    targets = SparseTargets(torch.tensor([[0]]), row(0.5).log(), row(0.5).log()[0])
    assert overlap_at_least(row(0.5, 0.25, 0.25).log(), support(targets, None)).item() == pytest.approx(0.5)


def test_top1_by_hand():
    targets = SparseTargets(torch.tensor([[2, 1], [1, 2]]), torch.tensor([[0.6, 0.4]]).log().repeat(2, 1), torch.zeros(2) - 30)
    q = torch.tensor([[0.1, 0.2, 0.7]]).log().repeat(2, 1)
    assert top1(q, support(targets, None)).tolist() == [1.0, 0.0]


def test_top1_misses_what_the_draft_lacks():
    # The target's best is id 0, which the draft does not have; its absent id is stored as draft id 0 with p = 0.
    targets = SparseTargets(torch.tensor([[0, 1]]), torch.tensor([[0.6, 0.4]]).log(), torch.tensor([-30.0]))
    translated = support(targets, draft_ids([1, 2], 3))
    assert translated.ids[0, 0] == 0
    assert top1(torch.tensor([[0.9, 0.1]]).log(), translated).tolist() == [0.0]


def test_a_support_in_equal_vocabularies_is_the_stored_one():
    targets = stored(noise(3, 9), 4)
    translated = support(targets, None)
    assert isinstance(translated, Support)
    assert torch.equal(translated.ids, targets.ids)
    torch.testing.assert_close(translated.p.sum(-1) + translated.tail, torch.ones(3, dtype=torch.float64))
