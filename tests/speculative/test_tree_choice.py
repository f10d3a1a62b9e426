"""The chosen tree is the best one: numbers worked by hand, all trees tried, and the counts that the rates come from."""

import json
from dataclasses import asdict
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative import Draft, MedusaHeads, Sampling, Tree, generate
from speculative.calibration import measure_trees, tree_costs
from speculative.metrics import Log, Ranks
from speculative.tree_choice import TreeCosts, best_tree, expected_ratio, grow, reach, tokens_per_round
from tests.speculative.tiny import perturbed, tiny

RATES = [[0.6, 0.2, 0.1], [0.5, 0.25], [0.4]]


def costs(draft=0.1, slope=0.05, largest=8, widest=8, wider=0.0):
    """A straight line in the nodes, the draft forward dearer by ``wider`` for each node more that is fed."""
    return TreeCosts(0.02, ((1, draft), (widest, draft + wider * (widest - 1))), ((0, 1.0), (largest, 1 + slope * largest)))


def test_reach_and_tokens_worked_by_hand():
    tree = Tree.of((2, 2, 1))
    assert reach(tree, RATES) == pytest.approx([1, 0.6, 0.2, 0.3, 0.15, 0.1, 0.05, 0.12, 0.06, 0.04, 0.02])
    assert tokens_per_round(tree, RATES) == pytest.approx(1 + 0.8 + 0.6 + 0.24)
    assert tokens_per_round(Tree((0, 0, 0, 0)), RATES) == pytest.approx(1.9)  # the fourth rank was never measured


def test_costs_lie_on_straight_lines_between_what_was_measured():
    measured = TreeCosts(0.02, ((1, 0.1), (4, 0.4)), ((0, 1.0), (2, 1.2), (8, 1.8)))
    assert measured.round(Tree((0,))) == pytest.approx(0.1 + 1.1)
    assert measured.round(Tree((0, 0, 0, 1, 2))) == pytest.approx(0.1 + 0.2 + 1.5)
    assert measured.round(Tree.of((4, 1))) == pytest.approx(0.1 + 0.4 + 1.8)
    with pytest.raises(ValueError, match="measured up to 8 nodes, not 9"):
        measured.round(Tree.of((9,)))
    with pytest.raises(ValueError, match="measured up to 4 nodes, not 5"):
        TreeCosts(0.02, ((1, 0.1), (4, 0.4)), ((0, 1.0), (16, 1.2))).round(Tree.of((5, 1)))


def test_growth_worked_by_hand():
    """By reach: 0.6; its child 0.3; then 0.2 beside it; 0.15, the child's sibling; 0.12 the third of the chain."""
    shapes = [tree.parents for tree in grow(RATES, 3, 5)]
    assert shapes == [(0,), (0, 1), (0, 0, 1), (0, 0, 1, 1), (0, 0, 1, 1, 3)]
    assert [tree.parents for tree in grow(RATES, 1, 5)] == [(0,), (0, 0), (0, 0, 0)]  # no fourth rank


def test_the_best_tree_worked_by_hand():
    tree, ratio = best_tree([[0.5, 0.3]], costs(draft=0.1, slope=0.1, largest=2))
    # One node: 1.5 / 1.2 = 1.25. Two: 1.8 / 1.3 = 1.385.
    assert tree == Tree((0, 0))
    assert ratio == pytest.approx(1.8 / 1.3)
    assert best_tree([[0.5, 0.1]], costs(draft=0.1, slope=0.1, largest=2)) == (Tree((0,)), pytest.approx(1.25))
    assert best_tree([[0.1, 0.1]], costs(draft=0.3, slope=0.1, largest=2)) == (None, 1.0)


def all_trees(size):
    """Every tree of up to ``size`` nodes."""
    for count in range(1, size + 1):
        for parents in product(*(range(node + 1) for node in range(count))):
            if list(parents) == sorted(parents):
                yield Tree(parents)


def falling(depths, ranks):
    """Rates that fall with the rank and leave some chance that none stays."""
    row = st.lists(st.floats(0.01, 1.0), min_size=ranks, max_size=ranks)
    return st.lists(row.map(lambda r: sorted((x / (sum(r) + 0.1) for x in r), reverse=True)), min_size=depths, max_size=depths)


@settings(deadline=None, max_examples=30)
@given(falling(3, 3), st.floats(0.0, 0.5), st.floats(0.0, 0.3))
def test_no_tree_is_better_than_the_chosen_one(rates, draft, slope):
    known = costs(draft, slope, largest=6, widest=6)
    tree, ratio = best_tree(rates, known)
    others = max(expected_ratio(other, rates, known) for other in all_trees(6) if other.depth <= 3)
    assert ratio == pytest.approx(max(1.0, others))
    assert tree is None or expected_ratio(tree, rates, known) == pytest.approx(ratio)


@settings(deadline=None, max_examples=40)
@given(falling(4, 3), st.floats(0.0, 0.5), st.floats(0.0, 0.3), st.floats(0.0, 0.2))
def test_no_chain_is_better_whatever_wide_forwards_cost(rates, draft, slope, wider):
    known = costs(draft, slope, wider=wider)
    _, ratio = best_tree(rates, known)
    assert ratio >= max(expected_ratio(Tree.of((1,) * depth), rates, known) for depth in range(1, 5)) - 1e-12


def test_trees_whose_cost_was_not_measured_are_no_candidates():
    tree, _ = best_tree([[0.3, 0.2, 0.2, 0.1]] * 4, costs(draft=0.01, slope=0.001, largest=8, widest=2))
    assert tree.size <= 8
    assert max(map(len, tree.levels)) <= 2


# What the rates come from


def test_ranks_are_counted_by_depth():
    """Tree (2, 2): nodes 1, 2; 3, 4 below 1; 5, 6 below 2. Four rows, the third near its end, the fourth cut by an EOS."""
    log = Log(4, 2, Tree.of((2, 2)))
    path = torch.tensor([[2, 5], [1, 0], [0, 0], [1, 4]])
    log.add(torch.arange(4), torch.tensor([2, 2, 1, 2]), torch.tensor([2, 1, 0, 2]), torch.tensor([3, 2, 1, 1]), path)
    assert log.ranks() == Ranks(tried=((4, 4), (2, 2)), kept=((2, 1), (1, 0)))
    assert log.ranks().rates == [[0.5, 0.25], [0.5, 0.0]]
    assert Log(1, 3).ranks() is None


def test_an_absent_child_is_not_tried():
    log = Log(1, 2, Tree((0, 0, 1)))
    log.add(torch.tensor([0]), torch.tensor([2]), torch.tensor([1]), torch.tensor([2]), torch.tensor([[2, 0]]))
    assert log.ranks() == Ranks(tried=((1, 1), (0, 0)), kept=((0, 1), (0, 0)))


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling()], ids=["greedy", "sampled"])
def test_measured_rates_give_the_tokens_per_round_of_their_own_tree(sampling):
    """Reaches add up to what decoding wrote: exact for the tree that was measured, where each depth has one rate a rank."""
    target = tiny(dtype=torch.float64)
    prompts = [[5, 9, 3, 7], [1, 2, 3], [30], [11, 12, 13, 14]]
    done = generate(target, perturbed(target), prompts, max_new_tokens=24, tree=(3,), sampling=sampling)
    counts = done.ranks
    assert sum(counts.kept[0]) == sum(part.accepted for part in done.acceptance)
    emitted, forwards = sum(p.emitted for p in done.acceptance), sum(p.target_forwards for p in done.acceptance)
    rounds_without_drafts = forwards - counts.tried[0][0]  # the last token of a row
    tokens = tokens_per_round(Tree.of((3,)), counts.rates)
    assert tokens * counts.tried[0][0] + rounds_without_drafts == pytest.approx(emitted)
    assert counts.rates[0][0] > counts.rates[0][1]


def test_rates_of_a_wide_tree_hold_in_its_parts():
    """Sampled at one node: how often each rank stays does not depend on the siblings after it."""
    target = tiny(dtype=torch.float64)
    options = {"max_new_tokens": 2, "sampling": Sampling(), "seed": 3}
    wide, narrow = (
        generate(target, perturbed(target), [[5, 9, 3, 7]] * 600, tree=tree, **options).ranks.kept[0] for tree in [(4,), (2,)]
    )
    assert wide[:2] == narrow


def test_costs_from_seconds_worked_by_hand():
    """Plain 10 ms; (1, 1) drafts 2 ms a round in two equal steps; (4, 1) drafts 4 ms, so feeding four costs 3."""
    rounds = {0: [(0.0, 0.008, 0.002)], 1: [(0.002, 0.011, 0.002)], 4: [(0.004, 0.014, 0.003)]}
    found = tree_costs(rounds)
    assert found.plain_seconds == pytest.approx(0.01)
    assert [pair for point in found.draft for pair in point] == pytest.approx([1, 0.1, 4, 0.3])
    assert [pair for point in found.verify for pair in point] == pytest.approx([0, 1.0, 2, 1.3, 8, 1.7])


def test_heads_are_paid_once_a_round_worked_by_hand():
    """Plain 10 ms; heads draft (1, 1) in 2 ms, (4, 1) in 3 ms: 0.2 once, and 0.1 more for a level of four."""
    rounds = {0: [(0.0, 0.008, 0.002)], 1: [(0.002, 0.011, 0.002)], 4: [(0.003, 0.014, 0.003)]}
    found = tree_costs(rounds, heads=True)
    assert found.heads == pytest.approx(0.2)
    assert [pair for point in found.draft for pair in point] == pytest.approx([1, 0.0, 4, 0.1])
    assert found.round(Tree.of((1, 1))) == pytest.approx(0.2 + 1.3)
    assert found.round(Tree.of((4, 1))) == pytest.approx(0.2 + 0.1 + 1.7)


def test_costs_come_back_from_json():
    found = tree_costs({0: [(0.0, 0.008, 0.002)], 1: [(0.002, 0.011, 0.002)], 4: [(0.003, 0.014, 0.003)]}, heads=True)
    assert TreeCosts.stored(json.loads(json.dumps(asdict(found)))) == found


def test_trees_of_heads_are_timed_too():
    target = tiny()
    heads = MedusaHeads(2, 32, 48).eval()
    *_, found = measure_trees(target, heads, [[1, 2, 3]] * 2, Sampling(0.0), (1, 3), new_tokens=6)
    assert found.heads > 0
    assert found.draft[0] == (1, 0.0)
    with pytest.raises(ValueError, match="1 Medusa heads, they cannot draft 2 tokens deep"):
        list(measure_trees(target, MedusaHeads(1, 32, 48).eval(), [[1, 2, 3]] * 2, Sampling(0.0), (1,), new_tokens=6))


def test_trees_are_timed_in_the_loop_that_uses_them():
    target = tiny()
    steps = list(measure_trees(target, Draft(tiny(seed=1)), [[1, 2, 3]] * 3, Sampling(0.0), (1, 3), new_tokens=6))
    assert len(steps) == 2
    assert [size for size, _ in steps[-1].draft] == [1, 3]
    assert [size for size, _ in steps[-1].verify] == [0, 2, 6]
    assert steps[-1].plain_seconds > 0
