"""Every measure equals its closed form, and the acceptance probability obeys Pinsker's bound."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative.alignment import agreement


def logits(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


def noise(rows, vocabulary, seed):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


P, Q = (0.5, 0.3, 0.2), (0.2, 0.2, 0.6)


def test_closed_forms():
    middle = [(a + b) / 2 for a, b in zip(P, Q, strict=True)]
    done = agreement(logits(P), logits(Q))
    assert done.forward_kl.item() == pytest.approx(kl(P, Q), abs=1e-6)
    assert done.reverse_kl.item() == pytest.approx(kl(Q, P), abs=1e-6)
    assert done.jensen_shannon.item() == pytest.approx((kl(P, middle) + kl(Q, middle)) / 2, abs=1e-6)
    assert done.overlap.item() == pytest.approx(0.6)
    assert done.total_variation.item() == pytest.approx(0.4)
    assert done.top1.item() == 0
    assert done.vocabulary_mass.item() == pytest.approx(1.0)


def test_logits_need_not_be_normalised():
    p, q = noise(6, 9, 0), noise(6, 9, 1)
    plain, shifted = agreement(p, q), agreement(p + 3.0, q - 7.0)
    for name, value in vars(plain).items():
        torch.testing.assert_close(getattr(shifted, name), value, atol=1e-5, rtol=1e-4)


def test_a_draft_equal_to_its_target_agrees_fully():
    p = noise(20, 31, 2)
    done = agreement(p, p.clone())
    for name in ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation"):
        assert getattr(done, name).abs().max() < 1e-5, name
    torch.testing.assert_close(done.overlap, torch.ones(20))
    assert done.top1.all()


def test_disjoint_supports_never_agree():
    done = agreement(logits((0.5, 0.5, 0.0, 0.0)), logits((0.0, 0.0, 0.3, 0.7)))
    assert done.overlap.item() == 0
    assert done.total_variation.item() == 1
    assert done.forward_kl.item() == done.reverse_kl.item() == math.inf
    assert done.jensen_shannon.item() == pytest.approx(math.log(2))
    assert done.top1.item() == 0


def test_tokens_of_no_probability_add_nothing_to_a_divergence():
    done = agreement(logits((0.5, 0.5, 0.0)), logits((0.25, 0.25, 0.5)))
    assert done.forward_kl.item() == pytest.approx(math.log(2))
    assert done.reverse_kl.item() == math.inf


def test_trimmed_vocabulary_by_hand():
    # p keeps 0.4 + 0.1 = 0.5 of its mass on ids 1 and 3, renormalised (0.8, 0.2); q = (0.3, 0.7).
    done = agreement(logits((0.3, 0.4, 0.2, 0.1)), logits((0.3, 0.7)), torch.tensor([1, 3]))
    assert done.vocabulary_mass.item() == pytest.approx(0.5)
    assert done.forward_kl.item() == pytest.approx(kl((0.8, 0.2), (0.3, 0.7)), abs=1e-6)
    assert done.reverse_kl.item() == pytest.approx(kl((0.3, 0.7), (0.8, 0.2)), abs=1e-6)
    js = (kl((0.8, 0.2), (0.55, 0.45)) + kl((0.3, 0.7), (0.55, 0.45))) / 2
    assert done.jensen_shannon.item() == pytest.approx(js, abs=1e-6)
    assert done.overlap.item() == pytest.approx(0.3 + 0.1)
    assert done.total_variation.item() == pytest.approx(0.6)
    assert done.top1.item() == 0  # the draft's best is id 3, the target's id 1


def test_top1_compares_target_ids_not_draft_places():
    p = logits((0.1, 0.2, 0.7), (0.1, 0.7, 0.2), (0.7, 0.2, 0.1))
    q = logits((0.1, 0.9), (0.1, 0.9), (0.9, 0.1))
    assert agreement(p, q, torch.tensor([0, 2])).top1.tolist() == [1.0, 0.0, 1.0]


def test_overlap_is_the_chance_that_a_drafted_token_is_kept():
    p, q = noise(1, 12, 3).double().softmax(-1)[0], noise(1, 12, 4).double().softmax(-1)[0]
    kept = sum(b * min(1.0, a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    assert agreement(p.log()[None], q.log()[None]).overlap.item() == pytest.approx(kept, abs=1e-6)


values = st.floats(-6, 6, width=32)


@settings(deadline=None, max_examples=200)
@given(st.integers(2, 8).flatmap(lambda n: st.tuples(*[st.lists(values, min_size=n, max_size=n)] * 2)))
def test_bounds(pair):
    done = agreement(*(torch.tensor([row]) for row in pair))
    tv, forward, reverse = done.total_variation.item(), done.forward_kl.item(), done.reverse_kl.item()
    assert -1e-6 <= tv <= 1 + 1e-6
    assert tv <= math.sqrt(max(min(forward, reverse), 0.0) / 2) + 2e-3  # Pinsker; float32 at KL ≈ 0
    assert tv <= math.sqrt(1 - math.exp(-forward)) + 2e-3 if forward > 0 else tv < 2e-3  # Bretagnolle and Huber
    assert done.jensen_shannon.item() <= math.log(2) * tv + 1e-5
