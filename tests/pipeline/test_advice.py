"""Advice follows from costs and curves that can be worked by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import advice
from pipeline.advice import batched, best_at, fit, lacking, resized
from speculative.cost import Costs, break_even_overlap, needed_overlap

COSTS = Costs(plain_seconds=0.02, draft=0.2, verify=(0.9, 0.9, 1.0), other=(0.1, 0.1, 0.1))
TARGET = {1: 1.0, 2: 1.0, 8: 2.0, 16: 4.0, 24: 6.0}
DRAFT = {1: 1.0, 8: 1.5, 24: 3.0}


def test_one_row_costs_what_was_measured():
    assert batched(COSTS, TARGET, DRAFT, 1) == COSTS


def test_eight_rows_by_hand():
    """Plain 0.9 · 2 + 0.1 = 1.9; a draft step 0.2 · 1.5; verifying 2 each is 16 tokens, four times 2; 3 each 24, six of 1⅙."""
    eight = batched(COSTS, TARGET, DRAFT, 8)
    assert eight.plain_seconds == pytest.approx(0.02 * 1.9)
    assert eight.draft == pytest.approx(0.3 / 1.9)
    assert eight.verify == pytest.approx((1.8 / 1.9, 0.9 * 4 / 1.9, 1.0 * 6 / (1 + 1 / 6) / 1.9))
    assert eight.other == pytest.approx((0.1 / 1.9,) * 3)
    assert eight.verify[0] + eight.other[0] == pytest.approx(1)


def test_speculation_that_wins_alone_may_lose_in_company():
    assert best_at(COSTS, 0.8)[0] > 0
    assert best_at(batched(COSTS, TARGET, DRAFT, 8), 0.8) == (0, 1.0)


def test_more_tokens_than_were_timed_are_refused():
    with pytest.raises(ValueError, match="32 tokens: the longest forward that was timed has 24"):
        batched(COSTS, TARGET, DRAFT, 16)


@pytest.mark.parametrize(("read", "cost"), [(20, 0.2), (100, 0.9), (60, 0.55), (10, 0.1125)])
def test_a_step_costs_on_a_line_through_draft_and_target(read, cost):
    """From 0.2 at 20 to 0.9 at 100: 0.00875 each."""
    assert resized(COSTS, read, 20, 100).draft == pytest.approx(cost)


def test_a_smaller_draft_is_not_promised_to_be_free():
    """From 0.1 at 40 to 0.9 at 100 the line would cross zero at 32.5; what is read still must be read."""
    steep = Costs(1.0, 0.1, (0.9, 0.9), (0.1, 0.1))
    assert resized(steep, 20, 40, 100).draft == pytest.approx(0.05)
    assert resized(steep, 40, 40, 100).draft == pytest.approx(0.1)


def test_the_best_length_by_hand():
    """K = 1: 1.5 / 1.2; K = 2: 1.75 / 1.5."""
    assert best_at(COSTS, 0.5) == (1, pytest.approx(1.25))
    assert best_at(COSTS, 0.0) == (0, 1.0)
    assert best_at(COSTS, 1.0) == (2, pytest.approx(2.0))


def test_the_overlap_that_a_ratio_needs_by_hand():
    """1 + a = 1.2 · 1.2 at K = 1; at K = 2 1 + a + a² = 1.8 needs 0.525."""
    assert needed_overlap(COSTS, 1.2) == pytest.approx(0.44, abs=2e-4)
    assert needed_overlap(COSTS, 2.0) == pytest.approx(1.0, abs=2e-4)
    assert needed_overlap(COSTS, 2.1) is None


@given(st.floats(0.01, 0.9), st.floats(0.8, 1.3))
def test_breaking_even_is_reaching_one(draft, verify):
    costs = Costs(1.0, draft, (0.95, verify, verify), (0.05, 0.05, 0.05))
    needed = needed_overlap(costs, 1.0)
    assert (1.0 if needed is None else needed) == pytest.approx(break_even_overlap(costs), abs=2e-4)
    above, below = (1.0, 1.0) if needed is None else (needed + 1e-3, needed - 1e-3)
    assert (best_at(costs, above)[0] > 0) == (needed is not None)
    if below > 0:
        assert best_at(costs, below) == (0, 1.0)


def curve(ceiling: float, scale: float, power: float, counts=(1e4, 2e4, 4e4, 8e4, 16e4)) -> list[tuple[float, float]]:
    return [(count, ceiling - scale * count**-power) for count in counts]


@given(st.floats(0.3, 0.9), st.floats(0.05, 0.25), st.sampled_from([0.3, 0.5, 1.0]))
def test_a_curve_is_found_again(ceiling, drop, power):
    learnt = fit(curve(ceiling, drop * 1e4**power, power))
    assert learnt.exponent == pytest.approx(power, abs=0.011)
    assert learnt.ceiling == pytest.approx(ceiling, abs=0.02)
    assert learnt.at(4e4) == pytest.approx(ceiling - drop * 4**-power, abs=1e-3)


def test_no_draft_is_promised_more_than_the_whole():
    learnt = fit([(1.0, 0.1), (2.0, 0.4), (3.0, 0.7), (4.0, 1.0)])
    assert learnt.ceiling <= 1


def test_a_curve_needs_points():
    with pytest.raises(ValueError, match="3 validations tell no curve, 4 may"):
        fit([(1, 0.1), (2, 0.2), (3, 0.3)])


def test_a_draft_that_still_learns_lacks_steps_or_data():
    """0.6 − 20 · t^−½: 0.55 at 160,000 tokens, 0.5646 at twice as many."""
    rising = curve(0.6, 20, 0.5)
    few, many = lacking(rising, epochs=1.5), lacking(rising, epochs=3.0)
    assert (few.what, many.what) == ("steps", "data")
    assert few.gain == pytest.approx(0.05 * (1 - 2**-0.5), abs=5e-4)
    assert few.ceiling == pytest.approx(0.6, abs=0.01)


def test_a_draft_that_has_learnt_what_it_can_lacks_capacity():
    found = lacking(curve(0.4, 2000, 1.0), epochs=1.0)
    assert (found.what, found.ceiling) == ("capacity", pytest.approx(0.4, abs=0.005))
    assert lacking([(n, 0.3) for n in (1e4, 2e4, 3e4, 4e4)], 1.0) == advice.Lack("capacity", 0.0, pytest.approx(0.3))


def test_a_draft_that_forgets_what_it_could_lacks_data():
    assert lacking([(1e4, 0.30), (2e4, 0.36), (3e4, 0.37), (4e4, 0.34)], epochs=1.0).what == "data"
    noisy = [(1e4, 0.300), (2e4, 0.330), (3e4, 0.332), (4e4, 0.330)]
    assert lacking(noisy, epochs=1.0).what == "capacity", "a fall within noise is none"


def test_the_curve_does_not_depend_on_the_unit_of_tokens():
    a = lacking(curve(0.6, 20, 0.5), 1.0)
    b = lacking([(count / 1000, overlap) for count, overlap in curve(0.6, 20, 0.5)], 1.0)
    assert np.allclose([a.gain, a.ceiling], [b.gain, b.ceiling])
