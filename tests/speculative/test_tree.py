"""A tree is numbered level by level; children, paths, levels and who sees whom follow from its parents."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speculative import Tree


def test_widths_by_depth():
    tree = Tree.of((2, 2, 1))
    assert tree.parents == (0, 0, 1, 1, 2, 2, 3, 4, 5, 6)
    assert tree.depths == (0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)
    assert (tree.size, tree.depth, tree.width) == (10, 3, 2)
    assert tree.children[:4] == ((1, 2), (3, 4), (5, 6), (7,))
    assert tree.levels == ((0,), (1, 2), (3, 4, 5, 6))
    assert tree.path(9) == [2, 5, 9]
    assert tree.cut(2) == Tree.of((2, 2))
    assert tree.cut(3) is tree


def test_an_uneven_tree():
    tree = Tree((0, 0, 0, 1, 1, 3, 4))
    assert tree.children == ((1, 2, 3), (4, 5), (), (6,), (7,), (), (), ())
    assert tree.children_table.tolist()[:4] == [[1, 2, 3], [4, 5, 0], [0, 0, 0], [6, 0, 0]]
    assert tree.inner_index.tolist() == [0, 1, -1, 2, 3, -1, -1, -1]
    assert tree.levels == ((0,), (1, 3), (4,))
    assert [i for i, seen in enumerate(tree.sees[7].tolist()) if seen] == [0, 1, 4, 7]
    assert tree.cut(1) == Tree((0, 0, 0))


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=30))
def test_every_tree_agrees_with_itself(numbers):
    parents = []
    for place, number in enumerate(numbers):  # not before the last parent, not after the node itself
        low = parents[-1] if parents else 0
        parents.append(low + number % (place + 1 - low))
    tree = Tree(tuple(parents))
    assert list(tree.depths) == sorted(tree.depths)
    for node in range(1, tree.size + 1):
        path = tree.path(node)
        assert len(path) == tree.depths[node]
        assert all(child in tree.children[parent] for parent, child in zip([0, *path], path, strict=False))
        assert torch.equal(tree.sees[node].nonzero().flatten(), torch.tensor([0, *path]))
    for depth in range(1, tree.depth + 1):
        assert tree.cut(depth).depths == tuple(d for d in tree.depths if d <= depth)


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ((), "a number of branches ≥ 1 for every depth"),
        ((2, 0), r"≥ 1 for every depth, not \(2, 0\)"),
        ((1.5,), "a number of branches"),
        ((12, 12), "has more than 128 nodes"),
        ((2,) * 60, "has more than 128 nodes"),
    ],
)
def test_widths_that_are_none_are_refused(widths, message):
    with pytest.raises(ValueError, match=f"tree: .*{message}"):
        Tree.of(widths)


@pytest.mark.parametrize("parents", [(1,), (0, 2), (0, 0, 1, 0), (-1,)])
def test_nodes_out_of_order_are_refused(parents):
    with pytest.raises(ValueError, match="level by level, each after its parent"):
        Tree(parents)


@pytest.mark.parametrize("count", [0, 129])
def test_too_few_or_many_nodes_are_refused(count):
    with pytest.raises(ValueError, match=f"1 to 128 nodes, not {count}"):
        Tree((0,) * count)
