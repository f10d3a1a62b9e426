"""Whole rounds of small trees, played through ``verify_tree``: the law to 1e-12, and the walk against one written out.

The steps that a round takes in its uniform numbers are found by bisection.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative import Tree
from speculative.sampling import draw
from speculative.tree_verification import Branches, verify_tree, verify_tree_choices
from speculative.verification import Guess, Rule, verify_sampled
from tests.speculative.bisection import measure
from tests.speculative.tree_tables import DOUBLE, Tables, children

LAST = 1 - 2.0**-53


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
