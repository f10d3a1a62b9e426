"""The law of the tokens that a tree commits is the target's, summed over every outcome to 1e-12; planted faults are caught.

Trees are summed node by node: every set of children that can be drawn, every one that can stay, every token that follows if
none does. Whole rounds are played in ``test_tree_rounds``.
"""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative.tree_drafter import without_replacement
from speculative.tree_verification import judge
from tests.speculative.tree_tables import DOUBLE, Tables, children


def committed(tables, widths, rule=judge, repeats=False, prefix=()):
    """The law of depth + 1 tokens: what ``rule`` commits in one round, continued by draws from the target."""
    p = tables.p[prefix]
    if len(prefix) == len(widths):
        return p
    q = tables.wide(prefix)
    tokens, alive = children(q, widths[len(prefix)], repeats)
    chances, residual = rule(p.expand(len(tokens), -1), q.expand(len(tokens), -1), tokens)
    kept = torch.zeros(tables.size, dtype=DOUBLE)
    for rank in range(tokens.shape[1]):
        kept.index_add_(0, tokens[:, rank], alive * chances[:, rank])
        alive = alive * (1 - chances[:, rank])
    follows = (alive[:, None] * residual / residual.sum(-1, keepdim=True)).sum(0)
    parts = []
    for token in range(tables.size):
        longer = (*prefix, token)
        below = committed(tables, widths, rule, repeats, longer) if kept[token] > 0 else 0.0
        parts.append(kept[token] * below + follows[token] * tables.law(longer))
    return torch.stack(parts)


def error(tables, widths, rule=judge, repeats=False):
    law = committed(tables, widths, rule, repeats)
    assert abs(law.sum().item() - 1) < 1e-9
    return (law - tables.law()).abs().max().item()


CASES = {
    "random": Tables(4, 3, 0),
    "more ids": Tables(5, 3, 1),
    "zeros in p": Tables(4, 3, 2, zeros_p=2),
    "zeros in q, which runs out": Tables(4, 3, 3, zeros_q=2),
    "zeros in both": Tables(5, 3, 4, zeros_p=2, zeros_q=2),
    "equal": Tables(4, 3, 5, kind="equal"),
    "equal, with zeros": Tables(5, 3, 6, zeros_p=2, kind="equal"),
    "disjoint": Tables(5, 3, 7, zeros_p=3, kind="disjoint"),
    "one-hot draft": Tables(4, 3, 8, kind="one-hot"),
    "one-hot target": Tables(4, 3, 9, zeros_p=3),
    "trimmed": Tables(5, 3, 10, kept=[0, 2, 3]),
    "trimmed to two": Tables(4, 3, 11, kept=[1, 3]),
    "trimmed, zeros in p": Tables(5, 3, 12, zeros_p=3, kept=[1, 2, 4]),
}
WIDTHS = [(3, 3, 3), (3, 2, 1), (1, 2, 3), (2, 2, 2), (1, 1, 1)]


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("case", CASES)
def test_the_law_is_the_target_s(case, widths):
    assert error(CASES[case], widths) < 1e-12


@pytest.mark.parametrize("case", CASES)
def test_a_child_that_came_before_counts_as_not_proposed(case):
    """Drawn with replacement, and the repeats passed over: that is drawing without."""
    assert error(CASES[case], (3, 2, 2), repeats=True) < 1e-12


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31), st.integers(3, 5), st.lists(st.integers(1, 3), min_size=1, max_size=2), st.data())
def test_the_law_is_the_target_s_for_any_tables(seed, size, widths, data):
    zeros = [data.draw(st.integers(0, size - 1)) for _ in range(2)]
    assert error(Tables(size, len(widths), seed, *zeros), tuple(widths)) < 1e-12


def test_the_chances_of_a_node_worked_by_hand():
    """p = (.5, .3, .2), q = (.2, .6, .2). Id 1 stays with .3 / .6; then p₂ = (1, 0, 0), q₂ = (.5, 0, .5)."""
    p, q = torch.tensor([[0.5, 0.3, 0.2]], dtype=DOUBLE), torch.tensor([[0.2, 0.6, 0.2]], dtype=DOUBLE)
    chances, residual = judge(p, q, torch.tensor([[1, 2, 0]]))
    torch.testing.assert_close(chances, torch.tensor([[0.5, 0.0, 1.0]], dtype=DOUBLE))
    # Id 2 is refused: p₃ = (p₂ − q₂)⁺ = (1, 0, 0). Id 0 would be sure to stay: q₃ = p₃, so nothing is left of p₃ − q₃.
    torch.testing.assert_close(residual / residual.sum(), torch.tensor([[1.0, 0.0, 0.0]], dtype=DOUBLE))


def seamed(lose=True, subtract=True, normalise_p=True, normalise_q=True, repeats_count=False, bonus="residual"):
    """The rule with a seam for every fault; without arguments it is right."""

    def rule(p, q, tokens):
        whole, first, chances = p, q, []
        for token in tokens.split(1, 1):
            if normalise_p:
                p = p / p.sum(-1, keepdim=True)
            q_now = q / q.sum(-1, keepdim=True).clamp(min=1e-300) if normalise_q else q
            at_q = q_now.gather(1, token)
            chance = (p.gather(1, token) / at_q.clamp(min=1e-300)).clamp(max=1.0)
            proposed = (at_q > 0) | repeats_count
            chances.append(torch.where(proposed, chance, 0.0))
            left = (p - q_now).clamp(min=0.0) if subtract else p
            p = torch.where(proposed & (left.sum(-1, keepdim=True) > 0), left, p)
            if lose:
                q = q.scatter(1, token, 0.0)
        last = {"residual": p, "target": whole, "first": (whole - first).clamp(min=0.0) + 1e-300}[bonus]
        return torch.cat(chances, 1), last

    return rule


FAULTS = {
    "residual not updated after a rejection": {"subtract": False},
    "drawn without replacement, judged as with it": {"lose": False},
    "residual not renormalised": {"normalise_p": False},
    "q not renormalised after it lost a token": {"normalise_q": False},
    "after the last rejection drawn from p": {"bonus": "target"},
    "after the last rejection drawn from the first residual": {"bonus": "first"},
}


def test_the_seamed_rule_is_right_without_a_fault():
    for case in CASES:
        assert error(CASES[case], (3, 2, 1), seamed()) < 1e-12, case


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_breaks_the_law(fault):
    assert error(CASES["more ids"], (3, 2, 1), seamed(**FAULTS[fault])) > 1e-3


def test_a_sibling_drawn_twice_and_judged_as_if_it_were_new_breaks_the_law():
    assert error(CASES["random"], (3, 2, 1), seamed(repeats_count=True), repeats=True) > 1e-3
    assert error(CASES["random"], (3, 2, 1), seamed(repeats_count=True)) < 1e-12


def test_what_stands_below_an_eos_does_not_matter():
    """The text ends at the EOS; the distributions that the models give behind it may be anything."""
    eos, tables, other = 2, Tables(4, 3, 20), Tables(4, 3, 21)
    strange = Tables(4, 3, 20)
    for prefix in strange.p:
        if eos in prefix:
            strange.p[prefix], strange.q[prefix] = other.p[prefix], other.q[prefix]

    def cut(law):
        """Mass by text, which ends with the first EOS."""
        found = {}
        for text in product(range(4), repeat=4):
            end = text.index(eos) + 1 if eos in text else 4
            found[text[:end]] = found.get(text[:end], 0.0) + law[text].item()
        return found

    want, found = cut(tables.law()), cut(committed(strange, (2, 2, 2)))
    assert want.keys() == found.keys()
    assert max(abs(want[text] - found[text]) for text in want) < 1e-12


def test_drawing_without_replacement_has_its_law_and_names_no_id_twice():
    q = torch.tensor([0.5, 0.2, 0.0, 0.3], dtype=DOUBLE)
    steps = (torch.arange(60, dtype=DOUBLE) + 0.5) / 60
    grid = torch.cartesian_prod(steps, steps)
    drawn = without_replacement(q.expand(len(grid), -1), grid)
    want, parts = children(q, 2)
    for pair, part in zip(want.tolist(), parts.tolist(), strict=True):
        assert abs((drawn == torch.tensor(pair)).all(-1).double().mean() - part) < 0.02
    assert (drawn[:, 0] != drawn[:, 1]).all()
    assert not (drawn == 2).any()


def test_a_q_that_runs_out_names_ids_that_are_not_judged():
    q = torch.tensor([[0.0, 1.0, 0.0]], dtype=DOUBLE)
    drawn = without_replacement(q, torch.tensor([[0.3, 0.4, 0.9]], dtype=DOUBLE))
    assert drawn[0, 0] == 1
    assert ((drawn >= 0) & (drawn < 3)).all()
    chances, residual = judge(torch.tensor([[0.2, 0.3, 0.5]], dtype=DOUBLE), q, drawn)
    assert chances.tolist() == [[0.3, 0.0, 0.0]]
    torch.testing.assert_close(residual / residual.sum(), torch.tensor([[2 / 7, 0, 5 / 7]], dtype=DOUBLE))
