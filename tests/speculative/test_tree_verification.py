"""The law of the tokens that a tree commits is the target's, summed over every outcome to 1e-12; planted faults are caught.

Large trees are summed node by node: every set of children that can be drawn, every one that can stay, every token that
follows if none does. Small trees are also played whole through ``verify_tree``, whose steps in its uniform numbers are
found by bisection.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative import Tree
from speculative.sampling import draw
from speculative.tree_drafter import without_replacement
from speculative.tree_verification import Branches, judge, verify_tree, verify_tree_choices
from speculative.verification import Guess, Rule, verify_sampled

DOUBLE = torch.float64
LAST = 1 - 2.0**-53


class Tables:
    """p(· | prefix) and q(· | prefix) for every prefix of up to ``depth`` tokens; q is over the ids of ``kept``."""

    def __init__(self, size, depth, seed, zeros_p=0, zeros_q=0, kind="random", kept=None):
        self.size, self.depth = size, depth
        self.kept = list(range(size)) if kept is None else kept
        self.vocabulary = None if kept is None else torch.tensor(kept)
        self.generator = torch.Generator().manual_seed(seed)
        self.p, self.q = {}, {}
        for prefix in (prefix for n in range(depth + 1) for prefix in product(range(size), repeat=n)):
            p = self.some(size, zeros_p)
            self.p[prefix] = p
            self.q[prefix] = {
                "random": lambda: self.some(len(self.kept), zeros_q),
                "equal": lambda p=p: p.clone(),
                "disjoint": lambda p=p: (p == 0).to(DOUBLE) / (p == 0).sum(),
                "one-hot": lambda: self.some(size, size - 1),
            }[kind]()

    def some(self, size, zeros):
        weights = torch.rand(size, generator=self.generator, dtype=DOUBLE) ** 3 + 1e-3
        weights[torch.randperm(size, generator=self.generator)[:zeros]] = 0.0
        return weights / weights.sum()

    def wide(self, prefix):
        """q over the target's ids."""
        return torch.zeros(self.size, dtype=DOUBLE).index_copy_(0, torch.tensor(self.kept), self.q[prefix])

    def law(self, prefix=()):
        """The target's law of what continues ``prefix`` to depth + 1 tokens, one axis for each token."""
        p = self.p[prefix]
        if len(prefix) == self.depth:
            return p
        return torch.stack([p[token] * self.law((*prefix, token)) for token in range(self.size)])


def children(q, width, repeats=False):
    """Every tuple of ``width`` children that can be drawn from q, and its chance; without replacement unless ``repeats``."""
    found = {(): 1.0}
    for _ in range(width):
        longer = {}
        for drawn, chance in found.items():
            left = q.clone()
            if not repeats:
                left[list(drawn)] = 0.0
            if left.sum() == 0:  # q ran out: any id
                longer[(*drawn, 0)] = chance
                continue
            for token, part in enumerate((left / left.sum()).tolist()):
                if part > 0:
                    longer[(*drawn, token)] = chance * part
        found = longer
    return torch.tensor(list(found)), torch.tensor(list(found.values()), dtype=DOUBLE)


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


# The whole round


def assignments(tables, tree):
    """Every tree that can be drawn, tokens (N), and its chance."""
    found = [((), 1.0)]
    for node, below in enumerate(tree.children):
        longer = []
        for tokens, chance in found:
            if not below:
                longer.append((tokens, chance))
                continue
            drawn, parts = children(tables.wide(tuple(tokens[i - 1] for i in tree.path(node))), len(below))
            longer += [((*tokens, *some), chance * part) for some, part in zip(drawn.tolist(), parts.tolist(), strict=True)]
        found = longer
    return [tokens for tokens, _ in found], torch.tensor([chance for _, chance in found], dtype=DOUBLE)


def measure(holds, count, steps):
    """For each of ``count`` rows, the length of the interval of uniforms, from 0 upwards, on which ``holds``."""
    low, high = torch.zeros(count, dtype=DOUBLE), torch.ones(count, dtype=DOUBLE)
    for _ in range(steps):
        middle = (low + high) / 2
        yes = holds(middle)
        low, high = torch.where(yes, middle, low), torch.where(yes, high, middle)
    return torch.where(low >= 1 - 2.0**-steps, 1.0, low)


def played(rule, tables, tree, limit=None, steps=46):
    """The law of depth + 1 tokens that whole rounds of ``rule`` commit."""
    drafted, weights = assignments(tables, tree)
    count = len(drafted)
    paths = [[tuple(tokens[i - 1] for i in tree.path(node)) for node in range(tree.size + 1)] for tokens in drafted]
    p = torch.stack([torch.stack([tables.p[path] for path in row]) for row in paths])
    inner = [node for level in tree.levels for node in level]
    q = torch.stack([torch.stack([tables.q[row[node]] for node in inner]) for row in paths])
    limit = tree.depth if limit is None else limit

    def play(path, node, u, follow, copies=1):
        """Nodes of ``path`` pass if anything passes, ``node`` is tested against u, all others fail."""
        accept = torch.full((count * copies, tree.size), LAST, dtype=DOUBLE)
        accept[:, [i - 1 for i in path]] = 0.0
        if node:
            accept[:, node - 1] = u
        branches = Branches(tree, torch.tensor(drafted).repeat(copies, 1), q.repeat(copies, 1, 1), tables.vocabulary)
        limits = torch.full((count * copies,), limit)
        return rule(p.repeat(copies, 1, 1), branches, accept, follow[:, None].expand(-1, tree.depth + 1), limits)

    half, last = torch.full((count,), 0.5, dtype=DOUBLE), torch.full((count,), LAST, dtype=DOUBLE)
    tokens = torch.arange(tables.size).repeat_interleave(count)
    law = torch.zeros((tables.size,) * (tree.depth + 1), dtype=DOUBLE)
    reach = {0: weights}
    for node in range(tree.size + 1):
        path, alive = tree.path(node), reach[node]
        for child in tree.children[node]:
            stays = measure(lambda u, c=child, path=path: (play(path, c, u, half).path == c).any(-1), count, steps)
            reach[child], alive = alive * stays, alive * (1 - stays)

        def below(u, path=path):
            return play(path, 0, last, u, tables.size).following <= tokens

        upto = measure(below, count * tables.size, steps).view(tables.size, count)
        parts = upto.diff(dim=0, prepend=torch.zeros(1, count, dtype=DOUBLE))
        for row in (alive > 1e-15).nonzero().flatten().tolist():
            for token in range(tables.size):
                start = (*paths[row][node], token)
                tail = tables.law(start) if len(start) <= tree.depth else 1.0
                law[start] += alive[row] * parts[token, row] * tail
    return (law - tables.law()).abs().max().item()


WHOLE = {
    "two and two": (Tables(3, 2, 30), Tree.of((2, 2))),
    "uneven": (Tables(3, 2, 31), Tree((0, 0, 2, 2))),
    "trimmed, zeros": (Tables(4, 2, 32, zeros_p=1, kept=[0, 2, 3]), Tree((0, 0, 1, 2))),
}


@pytest.mark.parametrize("case", WHOLE)
def test_whole_rounds_have_the_target_s_law(case):
    assert played(verify_tree, *WHOLE[case]) < 1e-12


@pytest.mark.parametrize("limit", [0, 1])
def test_a_limit_keeps_the_law(limit):
    assert played(verify_tree, *WHOLE["uneven"], limit=limit) < 1e-12


def bonus_of_the_parent(p, branches, accept, follow, limits):
    parents = torch.tensor([0, *branches.tree.parents])
    moved = torch.where((branches.tree.inner_index < 0)[:, None], p[:, parents], p)
    return verify_tree(moved, branches, accept, follow, limits)


def bonus_of_the_next_node(p, branches, accept, follow, limits):
    verdict = verify_tree(p, branches, accept, follow, limits)
    last = verdict.path.gather(1, (verdict.accepted - 1).clamp(min=0)[:, None]).squeeze(1)
    leaf = (branches.tree.inner_index[last] < 0) & (verdict.accepted > 0)
    other = draw(p[torch.arange(len(p)), last - 1], follow[torch.arange(len(p)), verdict.accepted])
    return replace(verdict, following=torch.where(leaf, other, verdict.following))


def q_of_the_first_node(p, branches, accept, follow, limits):
    return verify_tree(p, replace(branches, q=branches.q[:, :1].expand_as(branches.q)), accept, follow, limits)


@pytest.mark.parametrize("fault", [bonus_of_the_parent, bonus_of_the_next_node, q_of_the_first_node])
def test_a_round_that_looks_at_the_wrong_node_breaks_the_law(fault):
    assert played(fault, *WHOLE["two and two"], steps=20) > 1e-3


# The walk


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31))
def test_the_walk_agrees_with_one_written_out(seed):
    """Row by row with plain numbers, for random uneven trees, limits and uniforms."""
    generator = torch.Generator().manual_seed(seed)
    tree = [Tree((0, 0, 0, 1, 1, 3, 4)), Tree.of((3, 2)), Tree.of((2, 1, 2)), Tree((0, 1, 1, 2, 3, 3))][seed % 4]
    rows, size = 8, 5
    p = torch.rand(rows, tree.size + 1, size, generator=generator, dtype=DOUBLE).pow(2)
    q = torch.rand(rows, len([0 for below in tree.children if below]), size, generator=generator, dtype=DOUBLE).pow(2)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    tokens = torch.randint(size, (rows, tree.size), generator=generator)
    accept = torch.rand(rows, tree.size, generator=generator, dtype=DOUBLE)
    follow = torch.rand(rows, tree.depth + 1, generator=generator, dtype=DOUBLE)
    limits = torch.randint(tree.depth + 1, (rows,), generator=generator)
    verdict = verify_tree(p, Branches(tree, tokens, q), accept, follow, limits)
    for row in range(rows):
        node, path, weights, index = 0, [], p[row, 0], tree.inner_index.tolist()
        while tree.children[node] and len(path) < limits[row]:
            weights, left, stayed = p[row, node].clone(), q[row, index[node]].clone(), None
            for child in tree.children[node]:
                token = int(tokens[row, child - 1])
                if left[token] == 0:
                    continue
                ours, theirs = weights / weights.sum(), left / left.sum()
                if accept[row, child - 1] < ours[token] / theirs[token]:
                    stayed = child
                    break
                weights = (ours - theirs).clamp(min=0)
                left[token] = 0
            if stayed is None:
                break
            node, weights = stayed, p[row, stayed]
            path.append(stayed)
        assert verdict.path[row].tolist() == path + [0] * (tree.depth - len(path))
        assert verdict.accepted[row] == len(path)
        assert verdict.following[row] == draw(weights, follow[row, len(path)])


def test_greedy_walks_where_the_target_goes():
    tree = Tree.of((2, 2))  # nodes 1, 2; 3, 4 below 1; 5, 6 below 2
    tokens = torch.tensor([[7, 8, 1, 2, 3, 4]]).expand(5, -1)
    choices = torch.zeros(5, 7, dtype=torch.long)
    choices[0, 0] = 9  # neither child
    choices[1, [0, 1]] = torch.tensor([7, 3])  # 3 stands below the other child
    choices[2, [0, 2, 5]] = torch.tensor([8, 3, 5])
    choices[3, [0, 2, 6]] = torch.tensor([8, 4, 6])
    choices[4] = choices[3]
    verdict = verify_tree_choices(choices, Branches(tree, tokens), torch.tensor([2, 2, 2, 2, 1]))
    assert verdict.path.tolist() == [[0, 0], [1, 0], [2, 5], [2, 6], [2, 0]]
    assert verdict.accepted.tolist() == [0, 1, 2, 2, 1]
    assert verdict.following.tolist() == [9, 3, 5, 6, 4]


def test_a_tree_of_width_one_is_judged_as_the_chain():
    generator = torch.Generator().manual_seed(3)
    p = torch.rand(200, 4, 6, generator=generator, dtype=DOUBLE).pow(2)
    q = torch.rand(200, 3, 6, generator=generator, dtype=DOUBLE).pow(2)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    accept, follow = torch.rand(2, 200, 4, generator=generator, dtype=DOUBLE)
    tokens = draw(q, torch.rand(200, 3, generator=generator, dtype=DOUBLE))
    limits = torch.arange(200) % 4
    chain = verify_sampled(p, Guess(tokens, q), accept[:, :-1], follow, limits, Rule.TOKEN)
    tree = verify_tree(p, Branches(Tree.of((1, 1, 1)), tokens, q), accept[:, :-1], follow, limits)
    assert torch.equal(chain.accepted, tree.accepted)
    assert torch.equal(chain.following, tree.following)


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
