"""Bootstrap intervals of the median: exact where the resampling law can be written down, and of the right coverage."""

import numpy as np
import pytest

from pipeline.statistics import median_interval


def test_two_values_by_hand():
    # Medians of two draws from {0, 1}: 0 with probability ¼, ½ with ½, 1 with ¼.
    assert median_interval([0.0, 1.0], seed=0) == (0.5, 0.0, 1.0)
    assert median_interval([1.0, 0.0], seed=0, level=0.4) == (0.5, 0.5, 0.5)


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
