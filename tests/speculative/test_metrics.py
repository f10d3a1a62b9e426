"""Rates derived from counts equal what a hand count of the rounds gives, and only committed tokens count."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative.metrics import Acceptance, Log, total


def log(rounds, depth=3):
    """One row; ``rounds`` of (K, drafts accepted by the rule, tokens emitted)."""
    log = Log(1, depth)
    for count, accepted, emitted in rounds:
        log.add(torch.tensor([0]), torch.tensor([count]), torch.tensor([accepted]), torch.tensor([emitted]))
    return log.by_row()[0]


def test_counts_worked_by_hand():
    done = log([(3, 3, 4), (3, 1, 2), (3, 0, 1), (2, 2, 3), (0, 0, 1)])
    assert done.rounds == ((1, 0, 0, 0), (0, 0, 0, 0), (0, 0, 1, 0), (1, 1, 0, 1))
    assert (done.emitted, done.target_forwards, done.proposed, done.accepted) == (11, 5, 11, 6)
    assert done.rate == 6 / 11
    assert done.tokens_per_round == 11 / 5


def test_position_rates_worked_by_hand():
    done = log([(3, 3, 4), (3, 1, 2), (3, 0, 1), (2, 2, 3), (1, 1, 2)])
    # Draft 1: reached five times, kept four. Draft 2: reached by (3,3), (3,1), (2,2). Draft 3: by (3,3) alone.
    assert done.by_position == [4 / 5, 2 / 3, 1.0]


def test_a_position_never_reached_has_no_rate():
    done = log([(3, 0, 1), (3, 0, 1)])
    assert done.by_position[0] == 0.0
    assert all(map(math.isnan, done.by_position[1:]))


@pytest.mark.parametrize(
    ("accepted", "emitted", "proposed", "kept"),
    [
        (3, 4, 3, 3),  # nothing cut
        (3, 3, 3, 3),  # the third draft ends the row: no bonus token
        (3, 2, 2, 2),  # the second draft ends it: the third was never proposed
        (3, 1, 1, 1),
        (2, 2, 2, 2),
        (2, 3, 3, 2),  # the correction token ends it: draft 3 was rejected all the same
    ],
)
def test_drafts_beyond_a_cut_are_neither_proposed_nor_accepted(accepted, emitted, proposed, kept):
    done = log([(3, accepted, emitted)])
    assert (done.proposed, done.accepted, done.emitted) == (proposed, kept, emitted)
    assert done.target_forwards == 1


def test_rows_of_a_batch_are_counted_apart():
    log = Log(3, 2)
    log.add(torch.tensor([2, 0]), torch.tensor([2, 2]), torch.tensor([2, 0]), torch.tensor([3, 1]))
    log.add(torch.tensor([2]), torch.tensor([1]), torch.tensor([0]), torch.tensor([1]))
    first, idle, last = log.by_row()
    assert (first.rounds[2][0], first.emitted) == (1, 1)
    assert (idle.target_forwards, idle.emitted) == (0, 0)
    assert math.isnan(idle.rate)
    assert math.isnan(idle.tokens_per_round)
    assert (last.rounds[2][2], last.rounds[1][0], last.emitted) == (1, 1, 4)


plays = st.lists(
    st.integers(0, 4).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))), max_size=12
)  # uncut rounds of (K, accepted)


@settings(deadline=None)
@given(plays)
def test_emitted_tokens_are_accepted_ones_and_one_more_a_round(rounds):
    done = log([(k, m, m + 1) for k, m in rounds], depth=4)
    assert done.emitted == done.accepted + done.target_forwards == sum(m + 1 for _, m in rounds)
    assert done.proposed == sum(k for k, _ in rounds)
    for k, rate in enumerate(done.by_position, start=1):
        reached = [m for proposed, m in rounds if proposed >= k and m >= k - 1]
        assert rate == pytest.approx(sum(m >= k for m in reached) / len(reached) if reached else math.nan, nan_ok=True)


def test_total_adds_counts_of_different_depths():
    both = total([Acceptance(((1, 0), (2, 3)), 9), Acceptance(((0, 0, 0), (0, 1, 0), (0, 0, 4)), 14)])
    assert both == Acceptance(((1, 0, 0), (2, 4, 0), (0, 0, 4)), 23)
    assert both.rate == 12 / 14  # not the mean of rates


def test_total_of_nothing():
    nothing = total([])
    assert (nothing.target_forwards, nothing.emitted) == (0, 0)
    assert math.isnan(nothing.rate)
