"""Distributions follow their closed forms and transformers' warpers; draws and uniforms keep what they promise."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from speculative.sampling import Purpose, Sampling, draw, probabilities, uniforms


def noise(rows, vocabulary, seed=0, scale=3.0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def logs(*weights):
    return torch.tensor([weights], dtype=torch.float64).log()


def test_temperature_raises_probabilities_to_a_power():
    p = probabilities(logs(0.1, 0.2, 0.7), Sampling(temperature=0.5))
    torch.testing.assert_close(p, torch.tensor([[0.01, 0.04, 0.49]]) / 0.54)


def test_top_k_keeps_the_largest_and_renormalises():
    p = probabilities(logs(0.1, 0.2, 0.4, 0.3), Sampling(top_k=2))
    torch.testing.assert_close(p, torch.tensor([[0.0, 0.0, 4 / 7, 3 / 7]]))


@pytest.mark.parametrize(("top_p", "kept"), [(0.3, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.89, 3), (0.91, 4), (1.0, 4)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    p = probabilities(logs(0.1, 0.2, 0.4, 0.3), Sampling(top_p=top_p))
    whole = torch.tensor([0.4, 0.3, 0.2, 0.1])
    want = torch.where(torch.arange(4) < kept, whole, 0.0) / whole[:kept].sum()
    torch.testing.assert_close(p[0, [2, 3, 1, 0]], want)


def test_filters_follow_the_temperature():
    # At T = 2 the weights are as 4 : 3 : 2 (powers ½ of 16, 9, 4): the first alone has 4/9, under the uncut 16/29.
    p = probabilities(logs(16 / 29, 9 / 29, 4 / 29), Sampling(temperature=2.0, top_p=0.5))
    torch.testing.assert_close(p, torch.tensor([[4 / 7, 3 / 7, 0.0]]))


def test_greedy_is_one_hot_at_the_first_maximum():
    p = probabilities(torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]]), Sampling(temperature=0.0))
    assert p.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_a_tiny_temperature_stays_finite():
    p = probabilities(noise(5, 40), Sampling(temperature=1e-3))
    torch.testing.assert_close(p, probabilities(noise(5, 40), Sampling(temperature=0.0)))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, 200])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 0.95, 1.0])
def test_transformers_warpers_agree(temperature, top_k, top_p):
    logits = noise(64, 50, seed=top_k)
    warped = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        warped = TopKLogitsWarper(top_k)(None, warped)
    warped = TopPLogitsWarper(top_p)(None, warped)
    p = probabilities(logits, Sampling(temperature, top_k, top_p))
    torch.testing.assert_close(p, warped.softmax(-1))
    assert ((p > 0) == (warped.softmax(-1) > 0)).all()


@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("typical_p", [0.1, 0.6, 1.0])
@pytest.mark.parametrize("top_p", [0.7, 1.0])
def test_transformers_other_warpers_agree(min_p, typical_p, top_p):
    logits = noise(64, 50, seed=1)
    warped = TopPLogitsWarper(top_p)(None, TemperatureLogitsWarper(0.9)(None, logits))
    if min_p:
        warped = MinPLogitsWarper(min_p)(None, warped)
    if typical_p < 1:
        warped = TypicalLogitsWarper(typical_p)(None, warped)
    p = probabilities(logits, Sampling(0.9, 0, top_p, min_p, typical_p))
    torch.testing.assert_close(p, warped.softmax(-1))
    assert ((p > 0) == (warped.softmax(-1) > 0)).all()


@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
def test_a_nucleus_wider_than_the_part_that_is_sorted_first(scale):
    logits = noise(16, 5000, seed=2, scale=scale)
    p = probabilities(logits, Sampling(top_p=0.9))
    want = TopPLogitsWarper(0.9)(None, logits).softmax(-1)
    torch.testing.assert_close(p, want, atol=1e-6, rtol=1e-3)
    wide = (want > 0).sum(-1).max()
    assert (wide > 512) == (scale < 2)  # both ways are tried
    # Ties and rounding may move the edge of the nucleus by one token of the smallest weight.
    assert ((p > 0).sum(-1) - (want > 0).sum(-1)).abs().max() <= 1


def test_no_vocabulary_is_sorted_where_a_part_suffices(monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("sorted")

    logits = noise(4, 5000, scale=6.0)
    monkeypatch.setattr(torch.Tensor, "sort", refuse)
    probabilities(logits, Sampling(0.8, top_k=50, top_p=0.9))
    probabilities(logits, Sampling(0.8, top_p=0.9))
    with pytest.raises(AssertionError, match="sorted"):
        probabilities(logits / 60, Sampling(0.8, top_p=0.9))


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0), Sampling(0.5, top_p=0.9)])
@pytest.mark.parametrize("row", [[1.0, math.nan, 0.0], [math.inf, 0.0, 1.0], [-math.inf] * 3])
def test_logits_without_a_finite_maximum_are_refused(sampling, row):
    with pytest.raises(ValueError, match="NaN or infinite, or every token is excluded"):
        probabilities(torch.tensor([[0.0, 1.0, 2.0], row]), sampling)


def test_half_precision_logits_give_float32_that_sums_to_one():
    p = probabilities(noise(8, 500).bfloat16(), Sampling(temperature=0.9, top_p=0.9))
    assert p.dtype == torch.float32
    torch.testing.assert_close(p.sum(-1), torch.ones(8))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("typical_p", 0.0),
        ("typical_p", math.nan),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        Sampling(**{field: value})


weight = st.one_of(st.just(0.0), st.floats(2.0**-100, 1.0, width=32), st.just(1e-38))
weights = st.lists(weight, min_size=1, max_size=9).filter(any)
LAST = 1 - 2.0**-53


@settings(deadline=None, max_examples=400)
@given(weights, st.one_of(st.sampled_from([0.0, 2.0**-53, 0.5, LAST]), st.floats(0, LAST)))
def test_a_token_without_weight_is_never_drawn(weights, uniform):
    drawn = draw(torch.tensor([weights]), torch.tensor([uniform], dtype=torch.float64))
    assert weights[drawn.item()] > 0


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=7).filter(any))
def test_every_token_is_drawn_for_its_share_of_the_unit_interval(counts):
    total = sum(counts)
    points = (torch.arange(total, dtype=torch.float64) + 0.5) / total
    drawn = draw(torch.tensor(counts).float().expand(total, -1), points)
    assert torch.bincount(drawn, minlength=len(counts)).tolist() == counts


def test_draw_takes_any_leading_shape():
    drawn = draw(torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[1.0, 1.0], [1.0, 3.0]]]), torch.full((2, 2), 0.4))
    assert drawn.tolist() == [[1, 0], [0, 1]]


def block(seed, rows, positions, purpose=Purpose.TARGET):
    return uniforms(seed, torch.arange(rows)[:, None], torch.arange(positions), purpose)


@pytest.mark.parametrize("seed", [0, 1, -3, 2**40, 2**63 + 11])
@pytest.mark.parametrize("purpose", list(Purpose))
def test_uniforms_are_uniform(seed, purpose):
    u = block(seed, 200, 200, purpose)
    assert u.dtype == torch.float64
    assert u.min() >= 0
    assert u.max() < 1
    n = u.numel()
    assert abs(u.mean() - 0.5) < 4 * (1 / 12 / n) ** 0.5
    assert abs(u.var() - 1 / 12) < 4 * (1 / 180 / n) ** 0.5
    assert stats.chisquare(torch.histc(u, 100, 0, 1).numpy()).pvalue > 1e-3


def pair_chi_square(a, b):
    cells = (a * 10).long() * 10 + (b * 10).long()
    return stats.chisquare(torch.bincount(cells.flatten(), minlength=100).numpy()).pvalue


def test_neighbours_in_row_position_purpose_and_seed_are_independent():
    u = block(5, 300, 300)
    assert pair_chi_square(u[1:], u[:-1]) > 1e-3
    assert pair_chi_square(u[:, 1:], u[:, :-1]) > 1e-3
    assert pair_chi_square(u, u.T.contiguous().roll(1, 0)) > 1e-3
    assert pair_chi_square(u, block(6, 300, 300)) > 1e-3
    for purpose in (Purpose.DRAFT, Purpose.ACCEPT):
        assert pair_chi_square(u, block(5, 300, 300, purpose)) > 1e-3
    assert pair_chi_square(u, u) < 1e-9  # the test sees dependence


def test_no_number_repeats_over_rows_positions_purposes_and_seeds():
    u = torch.stack([block(seed, 40, 60, purpose) for seed in range(8) for purpose in Purpose])
    assert len(u.unique()) == u.numel()


def test_a_number_depends_on_nothing_but_its_own_key():
    whole = block(3, 7, 9)
    order = torch.tensor([4, 0, 6])
    assert torch.equal(uniforms(3, order[:, None], torch.arange(2, 5), Purpose.TARGET), whole[order, 2:5])
    assert uniforms(3, torch.tensor([5]), torch.tensor([8]), Purpose.TARGET).item() == whole[5, 8].item()


def test_the_global_generator_is_not_touched():
    before = torch.get_rng_state()
    draw(torch.ones(4, 3), block(0, 1, 4)[0])
    probabilities(noise(2, 5), Sampling(top_p=0.5))
    assert torch.equal(torch.get_rng_state(), before)
