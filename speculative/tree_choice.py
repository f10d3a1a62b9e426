"""Which tree to draft: the one with the most expected tokens for its cost.

    ratio(tree) = (1 + Σ_nodes reach) / (heads + Σ_levels draft(nodes fed) + verify(nodes))

reach(node) = reach(parent) · P(a child of that depth and rank stays | its parent stayed), as measured. A child's chance
does not depend on how many siblings come after it, so rates that a wide tree measured hold in every part of it; that they
do not depend on the branch is the one assumption (Medusa, Cai et al., 2401.10774; Sequoia, Chen et al., 2402.12374, with
costs measured on the machine). Nothing here runs a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from speculative.tree import LARGEST, Tree

Rates = Sequence[Sequence[float]]  # by depth, by rank


@dataclass(frozen=True)
class TreeCosts:
    """Costs in units of one plain step of ``plain_seconds``, each measured at some sizes, in between on straight lines.

    ``draft`` are (nodes fed, cost) of one draft forward, its draws included; ``verify`` are (nodes drafted, cost) of the
    target forward and all the rest of a round; a plain step, (0, 1), is the first. ``heads`` is what
    Medusa heads cost, once a round; 0 for a draft model.
    """

    plain_seconds: float
    draft: tuple[tuple[int, float], ...]
    verify: tuple[tuple[int, float], ...]
    heads: float = 0.0

    @classmethod
    def stored(cls, fields: dict[str, Any]) -> "TreeCosts":
        """The costs that ``dataclasses.asdict`` took apart, and JSON may have kept."""
        points = {name: tuple((size, cost) for size, cost in fields[name]) for name in ("draft", "verify")}
        return cls(**fields | points)

    @property
    def largest(self) -> int:
        """The most nodes that were measured."""
        return self.verify[-1][0]

    @property
    def widest(self) -> int:
        """The most nodes whose draft forward was measured."""
        return self.draft[-1][0]

    def round(self, tree: Tree) -> float:
        """Cost of a round with ``tree``, in plain steps."""
        drafting = self.heads + sum(_between(self.draft, len(level)) for level in tree.levels)
        return drafting + _between(self.verify, tree.size)


def _between(points: Sequence[tuple[int, float]], size: int) -> float:
    """The cost at ``size`` on straight lines between measured ``points``, which it must not exceed."""
    if size > points[-1][0]:
        raise ValueError(f"costs were measured up to {points[-1][0]} nodes, not {size}")
    (low, at_low) = points[0]
    for high, at_high in points:
        if size <= high:
            return at_high if high == low else at_low + (at_high - at_low) * max(size - low, 0) / (high - low)
        low, at_low = high, at_high
    return at_low


def reach(tree: Tree, rates: Rates) -> list[float]:
    """Chance that each node is on the path that stays; 1 for the anchor, 0 where no rate was measured."""
    found = [1.0]
    for node, parent in enumerate(tree.parents, start=1):
        found.append(found[parent] * _rate(rates, tree.depths[node], tree.children[parent].index(node)))
    return found


def _rate(rates: Rates, depth: int, rank: int) -> float:
    return rates[depth - 1][rank] if depth <= len(rates) and rank < len(rates[depth - 1]) else 0.0


def tokens_per_round(tree: Tree, rates: Rates) -> float:
    """Expected tokens of a round, the correction or bonus token included."""
    return sum(reach(tree, rates))


def expected_ratio(tree: Tree, rates: Rates, costs: TreeCosts) -> float:
    """Predicted plain time ÷ speculative time."""
    return tokens_per_round(tree, rates) / costs.round(tree)


def grow(rates: Rates, depth: int, largest: int) -> list[Tree]:
    """Trees of 1, 2, … ``largest`` nodes not deeper than ``depth``, each the one before and its likeliest new node.

    Where rates fall with the rank, no tree of the same size and depth has more expected tokens: a node is never likelier
    than its parent or the sibling before it, so the likeliest nodes are a tree.
    """
    paths: list[tuple[int, ...]] = []  # of ranks, in the order in which nodes were added
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    counts = {(): 0}  # children so far
    trees = []
    while len(paths) < largest:
        options = {
            (*path, count): chances[path] * _rate(rates, len(path) + 1, count)
            for path, count in counts.items()
            if len(path) < depth
        }
        best = max(options, key=options.__getitem__)
        if options[best] <= 0.0:
            break
        paths.append(best)
        chances[best], counts[best] = options[best], 0
        counts[best[:-1]] += 1
        trees.append(_tree(paths))
    return trees


def _tree(paths: Sequence[tuple[int, ...]]) -> Tree:
    """The tree of nodes given by the ranks on the way to them."""
    ordered = [(), *sorted(paths, key=lambda path: (len(path), path))]
    number = {path: node for node, path in enumerate(ordered)}
    return Tree(tuple(number[path[:-1]] for path in ordered[1:]))


def best_tree(rates: Rates, costs: TreeCosts) -> tuple[Tree | None, float]:
    """The tree with the highest predicted ratio, and that ratio; (None, 1.0) where plain decoding is faster.

    Candidates: for every depth, the trees that ``grow`` adds node by node, as far as costs were measured; and the chains,
    whose draft forwards are the cheapest.
    """
    best, ratio = None, 1.0
    largest = min(costs.largest, LARGEST)
    for depth in range(1, min(len(rates), largest) + 1):
        for tree in (*grow(rates, depth, largest), Tree.of((1,) * depth)):
            if max(map(len, tree.levels)) <= costs.widest and expected_ratio(tree, rates, costs) > ratio:
                best, ratio = tree, expected_ratio(tree, rates, costs)
    return best, ratio
