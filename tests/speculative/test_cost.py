"""Rounds follow from acceptance exactly, and the model picks and refuses K as its own formula demands."""

import json
import random
from dataclasses import asdict, replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative.cost import Costs, best_length, break_even_overlap, expected_ratio, rounds_needed


def costs(draft=0.1, verify=(0.9, 1.0, 1.1, 1.2, 1.3), other=(0.1, 0.1, 0.1, 0.1, 0.1)):
    return Costs(plain_seconds=0.02, draft=draft, verify=verify, other=other)


def rounds_of(kept, drafts):
    """Replay: ``kept[t]`` says whether the draft of position t would be accepted."""
    position = rounds = 0
    while position < len(kept):
        limit = min(drafts, len(kept) - position - 1)
        m = 0
        while m < limit and kept[position + m]:
            m += 1
        position += m + 1
        rounds += 1
    return rounds


def by_enumeration(acceptance, drafts):
    expected = 0.0
    for kept in product((False, True), repeat=len(acceptance)):
        weight = 1.0
        for a, yes in zip(acceptance, kept, strict=True):
            weight *= a if yes else 1 - a
        expected += weight * rounds_of(kept, drafts)
    return expected


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 1), max_size=8), st.integers(0, 5))
def test_rounds_equal_the_mean_over_all_outcomes(acceptance, drafts):
    assert rounds_needed(acceptance, drafts) == pytest.approx(by_enumeration(acceptance, drafts), abs=1e-9)


def test_rounds_equal_a_simulation_on_a_long_text():
    generator = random.Random(0)
    acceptance = [generator.random() ** 0.5 for _ in range(60)]
    plays = [rounds_of([generator.random() < a for a in acceptance], 4) for _ in range(4000)]
    mean = sum(plays) / len(plays)
    deviation = (sum((x - mean) ** 2 for x in plays) / len(plays)) ** 0.5
    assert rounds_needed(acceptance, 4) == pytest.approx(mean, abs=4 * deviation / len(plays) ** 0.5)


@pytest.mark.parametrize("a", [0.0, 0.3, 0.8, 0.95])
@pytest.mark.parametrize("drafts", [1, 2, 5])
def test_long_texts_of_equal_acceptance_follow_the_geometric_sum(a, drafts):
    length = 20_000
    tokens_per_round = (1 - a ** (drafts + 1)) / (1 - a)
    assert length / rounds_needed([a] * length, drafts) == pytest.approx(tokens_per_round, rel=1e-3)


def test_rounds_without_chance():
    assert rounds_needed([1.0] * 12, 3) == 3
    assert rounds_needed([1.0] * 13, 3) == 4
    assert rounds_needed([0.0] * 7, 3) == 7
    assert rounds_needed([0.5] * 7, 0) == 7
    assert rounds_needed([], 3) == 0
    assert rounds_needed([0.0], 3) == 1


def test_hard_stretches_hold_more_rounds_than_their_share_of_tokens():
    text = [1.0] * 40 + [0.0] * 40
    assert rounds_needed(text, 3) == 10 + 40
    assert 80 / rounds_needed(text, 3) < (4 + 1) / 2  # what averaging over positions would promise


def test_round_cost_and_ratio_by_hand():
    table = costs(draft=0.25, verify=(0.75, 1.0, 1.25), other=(0.25, 0.5, 0.75))
    assert table.longest == 2
    assert [table.round(k) for k in range(3)] == [1.0, 1.75, 2.5]
    assert expected_ratio([1.0] * 6, table, 2) == 6 / (2 * 2.5)
    assert expected_ratio([1.0] * 6, table, 0) == 1.0


def test_both_ways_of_decoding_read_the_prompt():
    """Ten tokens cost 10 · 0.3 = 3 plain steps to read, and a draft 10 · 0.1 = 1 more: (3 + 6) ÷ (3 + 1 + 2 · 2.5)."""
    table = replace(costs(draft=0.25, verify=(0.75, 1.0, 1.25), other=(0.25, 0.5, 0.75)), reading=0.3, draft_reading=0.1)
    assert expected_ratio([1.0] * 6, table, 2, prompt=10) == pytest.approx(1.0)
    assert expected_ratio([1.0] * 6, table, 2) == 6 / (2 * 2.5)
    assert expected_ratio([0.7] * 6, table, 0, prompt=10) == 1.0
    assert Costs.stored(json.loads(json.dumps(asdict(table)))) == table


def test_the_best_length_has_the_highest_ratio_over_all_texts():
    texts = [[0.9] * 50, [0.2] * 10, [0.7, 0.99] * 20]
    table = costs()
    ratios = [sum(map(len, texts)) / (sum(rounds_needed(text, k) for text in texts) * table.round(k)) for k in range(5)]
    best, ratio = best_length(texts, table)
    assert best == max(range(5), key=ratios.__getitem__) > 0
    assert ratio == pytest.approx(max(ratios))


@pytest.mark.parametrize(("a", "draft"), [(0.0, 0.1), (0.5, 0.6), (0.99, 5.0)])
def test_plain_decoding_wins_where_no_length_does(a, draft):
    assert best_length([[a] * 100], costs(draft=draft)) == (0, 1.0)


def test_the_best_length_grows_with_acceptance():
    best = [best_length([[a] * 200], costs())[0] for a in (0.05, 0.3, 0.6, 0.99)]
    assert best == sorted(best)
    assert (best[0], best[-1]) == (0, 4)


def test_break_even_of_one_draft_is_its_surplus_cost():
    # K = 1 wins once 1 + a > c + v(2) + o = 0.1 + 1.2 + 0.1.
    table = costs(verify=(0.9, 1.2), other=(0.1, 0.1))
    assert break_even_overlap(table) == pytest.approx(0.4, abs=2e-4)


def test_break_even_separates_plain_from_speculative():
    table = costs(draft=0.2)
    edge = break_even_overlap(table)
    assert 0 < edge < 1
    assert best_length([[edge - 0.01] * 5000], table)[0] == 0
    assert best_length([[edge + 0.01] * 5000], table)[0] > 0


def test_break_even_is_one_where_nothing_wins():
    assert break_even_overlap(costs(draft=5.0)) == 1.0
