"""Bootstrap intervals: exact where the resampling law can be written down, of the right coverage; correlations as scipy's."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from pipeline.statistics import average_ranks, correlation_interval, explained, mean_interval, median_interval


def test_two_values_by_hand():
    # Medians of two draws from {0, 1}: 0 with probability ¼, ½ with ½, 1 with ¼.
    assert median_interval([0.0, 1.0], seed=0) == (0.5, 0.0, 1.0)
    assert median_interval([1.0, 0.0], seed=0, level=0.4) == (0.5, 0.5, 0.5)


def test_the_mean_of_two_values_by_hand():
    # Means of two draws from {0, 1}: 0 with probability ¼, ½ with ½, 1 with ¼.
    assert mean_interval([0.0, 1.0], seed=0) == (0.5, 0.0, 1.0)
    assert mean_interval([1.0, 0.0], seed=0, level=0.4) == (0.5, 0.5, 0.5)
    assert mean_interval([1.0, 2.0, 6.0], seed=0)[0] == 3.0


def test_one_value_and_equal_values_have_no_width():
    assert median_interval([3.5], seed=1) == (3.5, 3.5, 3.5)
    assert median_interval([2.0] * 9, seed=1) == (2.0, 2.0, 2.0)


def test_the_median_is_no_mean():
    median, low, high = median_interval([1.0, 2.0, 3.0, 4.0, 1000.0], seed=0)
    assert median == 3.0
    assert low < 3.0 < high


def test_a_seed_repeats_and_another_differs():
    values = list(np.random.default_rng(0).normal(size=40))
    assert median_interval(values, seed=5) == median_interval(values, seed=5)
    assert len({median_interval(values, seed=s, resamples=50)[1:] for s in range(5)}) > 1


def test_more_prompts_and_a_lower_level_narrow_the_interval():
    values = np.random.default_rng(0).normal(size=1600)
    _, low, high = median_interval(values[:100], seed=0)
    _, low_many, high_many = median_interval(values, seed=0)
    _, low_half, high_half = median_interval(values[:100], seed=0, level=0.5)
    assert (high_many - low_many) < 0.5 * (high - low)
    assert low < low_half < high_half < high


def test_the_interval_covers_the_true_median_about_as_often_as_it_says():
    generator = np.random.default_rng(0)
    hits = 0
    for trial in range(300):
        _, low, high = median_interval(generator.exponential(size=25), seed=trial, resamples=400)
        hits += low <= np.log(2) <= high
    assert hits / 300 == pytest.approx(0.95, abs=0.04)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12))
def test_equal_values_share_their_rank(values):
    assert average_ranks(np.array(values, dtype=float)).tolist() == scipy.stats.rankdata(values).tolist()


@pytest.mark.parametrize(("ranks", "oracle"), [(True, scipy.stats.spearmanr), (False, scipy.stats.pearsonr)])
def test_correlations_are_those_of_scipy(ranks, oracle):
    generator = np.random.default_rng(0)
    x = generator.integers(0, 9, size=24).astype(float)  # with ties
    y = np.exp(x + generator.normal(size=24))
    value, low, high = correlation_interval(x, y, ranks, seed=0)
    assert value == pytest.approx(oracle(x, y).statistic, abs=1e-12)
    assert low < value < high


def test_ranks_see_any_rising_curve_and_pearson_a_line():
    x = [1.0, 2.0, 3.0, 4.0, 10.0]
    y = [value**3 for value in x]
    assert correlation_interval(x, y, True, seed=0) == pytest.approx((1, 1, 1))
    assert correlation_interval(x, y, False, seed=0)[0] < 1
    assert correlation_interval(x, [-value for value in y], True, seed=0)[0] == pytest.approx(-1)


def test_where_no_correlation_is_defined_none_is_given():
    for x, y in (([1.0, 2.0], [1.0, 2.0]), ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]), ([0.1] * 6, [0.3] * 6)):
        assert all(map(math.isnan, correlation_interval(x, y, True, seed=0)))


def test_interval_of_unrelated_drafts_holds_zero_about_as_often_as_it_says():
    generator, hits = np.random.default_rng(1), 0
    for trial in range(200):
        _, low, high = correlation_interval(*generator.normal(size=(2, 24)), True, seed=trial, resamples=300)
        hits += low <= 0 <= high
    assert hits / 200 == pytest.approx(0.94, abs=0.05)


def test_share_explained_by_hand():
    assert explained([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 1.0
    assert explained([2.0, 2.0, 2.0], [1.0, 2.0, 3.0]) == 0.0
    assert explained([1.5, 2.0, 2.5], [1.0, 2.0, 3.0]) == pytest.approx(1 - 0.5 / 2)
    assert explained([2.0, 3.0, 4.0], [1.0, 2.0, 3.0]) == pytest.approx(1 - 3 / 2), "a prediction that is always 1 too high"
    assert math.isnan(explained([1.0, 2.0], [1.0, 1.0]))
