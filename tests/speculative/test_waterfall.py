"""The way from overlap to time, by hand, and against the costs and counts it is made of."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.cost import Costs, expected_tokens
from speculative.metrics import Acceptance
from speculative.waterfall import STEPS, Waterfall, tried, waterfall

COSTS = Costs(plain_seconds=0.01, draft=0.25, verify=(1.0, 1.1, 1.3), other=(0.0, 0.1, 0.2))
# K = 2: four rounds with nothing accepted, two with one draft, four with both; the text ended in one round with one draft.
COUNTS = Acceptance(rounds=((0, 0, 0), (0, 1, 0), (4, 2, 4)), emitted=1 + 4 * 1 + 2 * 2 + 4 * 3)


def test_tokens_of_a_round_of_equal_chances():
    assert expected_tokens(0.5, 2) == 1 + 0.5 + 0.25
    assert expected_tokens(0.0, 3) == 1
    assert expected_tokens(1.0, 3) == 4


def test_drafts_behind_a_rejection_were_not_tried():
    assert tried(COUNTS) == 1 + 4 * 1 + 2 * 2 + 4 * 2


def test_levels_by_hand():
    levels = waterfall(0.8, COUNTS, COSTS, 2, 1.05)
    cost = 2 * 0.25 + 1.3 + 0.2  # = 2
    first = 7 / 11  # eleven rounds tried a first draft, seven kept it
    each = (1 + 2 + 8) / 17
    assert levels.text == pytest.approx((1 + 0.8 + 0.64) / cost)
    assert levels.prefixes == pytest.approx((1 + first + first**2) / cost)
    assert levels.positions == pytest.approx((1 + each + each**2) / cost)
    assert levels.product == pytest.approx((21 / 11) / cost)
    assert levels.time == 1.05


def test_the_step_that_lost_most_is_named():
    assert Waterfall(2.0, 1.9, 1.0, 1.1, 1.05).weakest == "positions"
    assert Waterfall(2.0, 2.1, 2.2, 2.2, 1.5).weakest == "operations"


@given(st.lists(st.floats(0.1, 10), min_size=5, max_size=5))
def test_the_factors_multiply_to_the_whole_way(levels):
    steps = Waterfall(*levels)
    assert tuple(steps.factors) == STEPS
    assert math.prod(steps.factors.values()) == pytest.approx(levels[-1] / levels[0])


@given(st.floats(0.05, 0.95), st.integers(1, 4))
def test_where_the_theory_holds_only_the_clock_can_differ(chance, drafts):
    """Rounds in the proportions of independent, equal chances: all levels but the last are one."""
    many = 10**7
    shares = [chance**k * (1 - chance) for k in range(drafts)] + [chance**drafts]
    row = tuple(round(many * share) for share in shares)
    rounds = (*[(0,) * (drafts + 1)] * drafts, row)
    counts = Acceptance(rounds, sum(count * (k + 1) for k, count in enumerate(row)))
    costs = Costs(0.01, 0.1, (1.0,) * (drafts + 1), (0.0,) * (drafts + 1))
    *theory, _ = waterfall(chance, counts, costs, drafts, 1.0).levels
    assert theory == pytest.approx([theory[0]] * 4, rel=1e-4)
