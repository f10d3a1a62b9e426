"""The law of typical acceptance is its formula, summed over every outcome to 1e-12, and is not the target's; faults are caught.

The oracle walks plain Python numbers: every block or tree that can be drafted with its chance, which of its tokens pass
the threshold, the longest branch, the token drawn after it. What the rule does is read off the rule: the token that follows
is a step function of its uniform number, and bisection finds the steps.
"""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative import Tree, Typical
from speculative.sampling import draw
from speculative.tree_verification import Branches
from speculative.typical import divergence, emitted, excess, staying, verify_typical
from speculative.verification import Guess, Verdict
from tests.speculative.bisection import measure
from tests.speculative.tree_tables import DOUBLE, Tables, children

THRESHOLDS = Typical(0.25, 0.6)


# The oracle


def keeps(p, token, thresholds=THRESHOLDS):
    """p(x) > min(ε, δ exp(−H)), in Python's own numbers."""
    entropy = -sum(x * math.log(x) for x in p.tolist() if x > 0)
    return p[token].item() > min(thresholds.epsilon, thresholds.delta * math.exp(-entropy))


def drafted(tables, tree):
    """Every tree of tokens that can be drafted, as tuples of tokens by node, with its chance."""
    found = {(): 1.0}
    for node, below in enumerate(tree.children):
        if not below:
            continue
        longer = {}
        for tokens, chance in found.items():
            options, chances = children(tables.wide(prefix_of(tree, tokens, node)), len(below))
            for drawn, part in zip(options.tolist(), chances.tolist(), strict=True):
                longer[(*tokens, *drawn)] = longer.get((*tokens, *drawn), 0.0) + chance * part
        found = longer
    return found


def prefix_of(tree, tokens, node):
    return tuple(tokens[passed - 1] for passed in tree.path(node))


def longest(tables, tree, tokens, node=0):
    """The longest branch below ``node`` of which all stays, the first of equals."""
    p, best = tables.p[prefix_of(tree, tokens, node)], []
    for child in tree.children[node]:
        if keeps(p, tokens[child - 1]):
            branch = [child, *longest(tables, tree, tokens, child)]
            best = branch if len(branch) > len(best) else best
    return best


def target_law(tables, length, prefix=()):
    """The target's law of the next ``length`` tokens, one axis for each."""
    known = tables.__dict__.setdefault("laws", {})
    if (length, prefix) not in known:
        p = tables.p[prefix] if length else torch.tensor(1.0, dtype=DOUBLE)
        rest = [target_law(tables, length - 1, (*prefix, token)) for token in range(tables.size)] if length > 1 else None
        known[length, prefix] = p if rest is None else torch.stack([p[token] * rest[token] for token in range(tables.size)])
    return known[length, prefix]


def formula(tables, tree):
    """The law of depth + 1 tokens: one round, continued by draws from the target; one axis for each token."""
    law = torch.zeros((tables.size,) * (tree.depth + 1), dtype=DOUBLE)
    for tokens, chance in drafted(tables, tree).items():
        kept = prefix_of(tree, tokens, [0, *longest(tables, tree, tokens)][-1])
        law[kept] += chance * target_law(tables, tree.depth + 1 - len(kept), kept)
    return law


# What the rule does


def chain_rule(p, tree, tokens, follow, thresholds=THRESHOLDS):
    """The rule on a chain; the path is written as that of a tree."""
    limits = torch.full((len(p),), tree.depth)
    verdict = verify_typical(p, Guess(tokens, None), follow, limits, thresholds)
    assert verdict.path is None
    place = torch.arange(1, tree.depth + 1)
    return Verdict(verdict.accepted, verdict.following, torch.where(place <= verdict.accepted[:, None], place, 0))


def tree_rule(p, tree, tokens, follow, thresholds=THRESHOLDS):
    return verify_typical(p, Branches(tree, tokens), follow, torch.full((len(p),), tree.depth), thresholds)


def committed(tables, tree, rule, steps=53):
    """The same law, of what ``rule`` does, to 2 to the power of −``steps``."""
    found = drafted(tables, tree)
    tokens, size = torch.tensor(list(found)), tables.size
    p = torch.stack([torch.stack([tables.p[prefix_of(tree, row, n)] for n in range(tree.size + 1)]) for row in tokens.tolist()])
    paths = rule(p, tree, tokens, torch.full((len(p), tree.depth + 1), 0.5, dtype=DOUBLE)).path
    wanted = torch.arange(size).repeat_interleave(len(p))

    def below(u):
        verdict = rule(p.repeat(size, 1, 1), tree, tokens.repeat(size, 1), u[:, None].expand(-1, tree.depth + 1))
        return verdict.following <= wanted

    upto = measure(below, len(wanted), steps).view(size, len(p))
    law = torch.zeros((size,) * (tree.depth + 1), dtype=DOUBLE)
    for row, chance in enumerate(found.values()):
        kept = tuple(tokens[row, node - 1].item() for node in paths[row].tolist() if node)
        for token in range(size):
            share = upto[token, row] - (upto[token - 1, row] if token else 0.0)
            law[(*kept, token)] += chance * share * target_law(tables, tree.depth - len(kept), (*kept, token))
    assert abs(law.sum() - 1) < 1e-3
    return law


CHAINS = {
    "random 4 by 2": Tables(4, 2, 1),
    "random 5 by 2": Tables(5, 2, 2),
    "random 3 by 3": Tables(3, 3, 42),
    "zeros in p": Tables(4, 3, 3, zeros_p=2),
    "zeros in q": Tables(4, 3, 4, zeros_q=2),
    "equal": Tables(4, 3, 5, kind="equal"),
    "disjoint": Tables(5, 2, 6, zeros_p=3, kind="disjoint"),
    "one-hot draft": Tables(4, 3, 7, kind="one-hot"),
    "one-hot target": Tables(4, 2, 8, zeros_p=3),
    "trimmed": Tables(5, 2, 10, kept=[0, 2, 3]),
}
SHAPES = {
    "binary": Tree.of((2, 2)),
    "flat": Tree.of((3,)),
    "narrowing": Tree.of((3, 1)),
    "uneven": Tree((0, 0, 1, 3)),
    "the second goes deeper": Tree((0, 0, 2, 3)),
}
TREES = {
    "random": Tables(3, 3, 0),
    "zeros in p": Tables(3, 3, 2, zeros_p=1),
    "zeros in q, which runs out": Tables(3, 3, 3, zeros_q=2),
    "equal": Tables(3, 3, 5, kind="equal"),
    "trimmed": Tables(4, 3, 10, kept=[0, 2, 3]),
}


@pytest.mark.parametrize("case", CHAINS)
def test_the_law_of_a_chain_is_the_formula(case):
    tables = CHAINS[case]
    chain = Tree.of((1,) * tables.depth)
    law = committed(tables, chain, chain_rule)
    assert (law - formula(tables, chain)).abs().max() < 1e-12
    first = emitted(tables.p[()], tables.q[()], tables.vocabulary, THRESHOLDS)
    assert (law.flatten(1).sum(1) - first).abs().max() < 1e-12
    assert abs(first.sum() - 1) < 1e-12


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", TREES)
def test_the_law_of_a_tree_is_the_formula(case, shape):
    law = committed(TREES[case], SHAPES[shape], tree_rule)
    assert abs(law.sum() - 1) < 1e-12
    assert (law - formula(TREES[case], SHAPES[shape])).abs().max() < 1e-12


@pytest.mark.parametrize("case", ["random", "trimmed"])
def test_a_tree_of_width_one_is_a_chain(case):
    chain = Tree.of((1, 1, 1))
    assert torch.equal(committed(TREES[case], chain, tree_rule), committed(TREES[case], chain, chain_rule))


@pytest.mark.parametrize("seed", range(4))
def test_several_children_of_one_node_give_more_of_the_same(seed):
    """One level: s · q(x)[x stays] / a + (1 − s) · p(x), s the chance that any of the children stays, a that of one."""
    tables = Tables(4, 1, 30 + seed)
    p, q = tables.p[()], tables.q[()]
    stays = staying(p, q, None, THRESHOLDS)
    if stays.sum() == 0:
        pytest.fail("the tables keep nothing, choose another seed")
    options, chances = children(q, 2)
    any_stays = sum(
        chance for drawn, chance in zip(options.tolist(), chances.tolist(), strict=True) if any(keeps(p, x) for x in drawn)
    )
    want = any_stays * stays / stays.sum() + (1 - any_stays) * p
    found = committed(tables, Tree.of((2,)), tree_rule).sum(1)
    assert (found - want).abs().max() < 1e-12


# It is lossy


@pytest.mark.parametrize("case", ["random 4 by 2", "random 3 by 3", "equal", "trimmed"])
def test_the_law_is_not_the_target_s(case):
    tables = CHAINS[case]
    chain = Tree.of((1,) * tables.depth)
    assert (committed(tables, chain, chain_rule) - target_law(tables, chain.depth + 1)).abs().sum() / 2 > 0.02


@pytest.mark.parametrize("shape", SHAPES)
def test_the_law_of_a_tree_is_not_the_target_s(shape):
    tables, tree = TREES["random"], SHAPES[shape]
    assert (committed(tables, tree, tree_rule) - target_law(tables, tree.depth + 1)).abs().sum() / 2 > 0.02


def test_it_is_the_target_s_where_everything_stays_and_the_draft_is_the_target():
    tables, chain = CHAINS["equal"], Tree.of((1, 1, 1))
    law = committed(tables, chain, lambda *given: chain_rule(*given, Typical(1e-9, 1e-9)))
    assert (law - target_law(tables, 4)).abs().max() < 1e-12


# Planted faults


def seamed(bound=min, base=math.e, at="parent", last="target", wins="longest"):
    """The rule with a seam for every fault; without arguments it is right."""

    def rule(p, tree, tokens, follow):
        row = torch.arange(len(p))
        entropy = torch.special.entr(p).sum(-1) / math.log(base)
        level = (THRESHOLDS.delta * (-entropy).exp()).apply_(lambda x: bound(x, THRESHOLDS.epsilon))
        paths = torch.zeros(len(p), tree.depth, dtype=torch.long)
        for b in range(len(p)):
            alive = {0: []}
            for node, parent in enumerate(tree.parents, start=1):
                judge = {"parent": parent, "node": node}[at]
                if parent in alive and p[b, parent, tokens[b, node - 1]] > level[b, judge]:
                    alive[node] = [*alive[parent], node]
            branches = [path for node, path in alive.items() if not any(c in alive for c in tree.children[node])]
            if wins == "last":
                branches.reverse()
            best = max(branches, key=len) if wins != "first" else min(branches)
            paths[b, : len(best)] = torch.tensor(best, dtype=torch.long)
        accepted = (paths > 0).sum(-1)
        node = torch.nn.functional.pad(paths, (1, 0)).gather(1, accepted[:, None]).squeeze(1)
        weights = p[row, node].clone()
        if last == "without the first child":
            weights[row, tokens[:, 0]] = 0.0
        return Verdict(accepted, draw(weights, follow[row, accepted]), paths)

    return rule


FAULTS = {
    "the larger of the two thresholds": {"bound": max},
    "entropy in bits": {"base": 2.0},
    "the threshold of the node's own distribution": {"at": "node"},
    "a rejected token cannot follow": {"last": "without the first child"},
    "the first branch wins": {"wins": "first"},
    "the last of equal branches wins": {"wins": "last"},
}
PLANTED = Tables(3, 2, 42), Tree.of((2, 1))


def test_the_seamed_rule_is_right_without_a_fault():
    tables, tree = PLANTED
    assert (committed(tables, tree, seamed()) - formula(tables, tree)).abs().max() < 1e-12


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_breaks_the_formula(fault):
    tables, tree = PLANTED
    assert (committed(tables, tree, seamed(**FAULTS[fault]), steps=14) - formula(tables, tree)).abs().max() > 1e-3


# One verdict, thresholds, distances


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_drafts_behind_a_limit_are_as_if_never_proposed(limit):
    tables = CHAINS["random 3 by 3"]
    blocks = torch.tensor(list(product(range(3), repeat=3)))
    p = torch.stack([torch.stack([tables.p[tuple(b[:j])] for j in range(4)]) for b in blocks.tolist()])
    follow = torch.rand(len(p), 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    found = verify_typical(p, Guess(blocks, None), follow, torch.full((len(p),), limit), THRESHOLDS)
    short = verify_typical(p[:, : limit + 1], Guess(blocks[:, :limit], None), follow, torch.full((len(p),), limit), THRESHOLDS)
    assert torch.equal(found.accepted, short.accepted)
    assert torch.equal(found.following, short.following)


def test_numbers_worked_by_hand():
    """H(.5, .3, .2) = 1.0297, e^−H = .357 > ε = .25: ids 0 and 1 stay, .8 of q; the other .2 are drawn from p."""
    p, q = (torch.tensor([row], dtype=DOUBLE) for row in ([0.5, 0.3, 0.2], [0.2, 0.6, 0.2]))
    rule = Typical(0.25, 1.0)
    assert rule.threshold(p).item() == 0.25
    assert Typical(0.9, 0.5).threshold(p).item() == pytest.approx(0.5 * math.exp(-1.0296530), abs=1e-7)
    assert rule.keeps(p).tolist() == [[True, True, False]]
    law = emitted(p, q, None, rule)
    torch.testing.assert_close(law, torch.tensor([[0.3, 0.66, 0.04]], dtype=DOUBLE))
    variation, kl = divergence(p, law)
    assert variation.item() == pytest.approx(0.36)
    assert kl.item() == pytest.approx(0.3 * math.log(0.6) + 0.66 * math.log(2.2) + 0.04 * math.log(0.2))
    trimmed = emitted(p, torch.tensor([[0.5, 0.5]], dtype=DOUBLE), torch.tensor([0, 2]), rule)
    torch.testing.assert_close(trimmed, torch.tensor([[0.75, 0.15, 0.1]], dtype=DOUBLE))
    torch.testing.assert_close(excess(p.expand(3, -1), torch.tensor([0, 1, 2]), rule), torch.tensor([0.2, 0.2, -0.8]).double())


def test_a_token_that_the_target_never_says_is_never_kept_however_low_the_threshold():
    p = torch.tensor([[0.0, 1.0]], dtype=DOUBLE)
    assert Typical(1e-12, 1e-12).keeps(p).tolist() == [[False, True]]
    assert divergence(p, emitted(p, torch.tensor([[0.7, 0.3]], dtype=DOUBLE), None, THRESHOLDS))[1].item() == 0.0


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(2, 6), st.floats(0.01, 1), st.floats(0.01, 1))
def test_the_distances_agree_with_one_another(seed, size, epsilon, delta):
    """The excess is 0 under the target's own law, and bounds total variation under the rule's; KL obeys Pinsker."""
    tables, rule = Tables(size, 1, seed), Typical(epsilon, delta)
    p, q, ids = tables.p[()], tables.q[()], torch.arange(size)
    law = emitted(p, q, None, rule)
    variation, kl = divergence(p, law)
    found = excess(p.expand(size, -1), ids, rule)
    assert abs((p * found).sum()) < 1e-12
    assert -1e-12 <= (law * found).sum() <= variation + 1e-12
    assert kl >= 2 * variation**2 - 1e-12
    assert divergence(p, p)[0] == divergence(p, p)[1] == 0


@pytest.mark.parametrize("name", ["epsilon", "delta"])
@pytest.mark.parametrize("value", [0.0, -0.1, 1.01, math.nan, math.inf])
def test_thresholds_that_mean_nothing_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"typical: {name} must lie in \(0, 1\], not"):
        Typical(**{name: value})
