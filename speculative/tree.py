"""The shape of a draft tree: which node continues which.

Node 0 is the anchor, the last committed token; nodes 1, 2, … are drafted, level by level, the children of a node side by
side and the likeliest first. A chain is the tree in which every node has one child. Knows no token and no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

LARGEST = 128  # nodes; far beyond what pays


@dataclass(frozen=True)
class Tree:
    """``parents[i]`` is the node that node i + 1 continues.

    Raises:
        ValueError: nodes out of order, or too many of them.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.size <= LARGEST:
            raise ValueError(f"tree: it needs 1 to {LARGEST} nodes, not {self.size}")
        ordered = list(self.parents) == sorted(self.parents)
        if not ordered or any(not 0 <= parent <= i for i, parent in enumerate(self.parents)):
            raise ValueError(f"tree: nodes must come level by level, each after its parent, not {self.parents}")

    @classmethod
    def of(cls, widths: Sequence[int]) -> "Tree":
        """The tree in which every node at depth d has ``widths[d]`` children: (3, 2, 1) has 3 + 6 + 6 nodes."""
        listed = isinstance(widths, Sequence) and not isinstance(widths, str)
        if not listed or not widths or any(type(width) is not int or width < 1 for width in widths):
            shown = tuple(widths) if listed else repr(widths)
            raise ValueError(f"tree: it needs a number of branches ≥ 1 for every depth, not {shown}")
        level, parents = [0], []
        for width in widths:
            first = len(parents) + 1
            if len(parents) + len(level) * width > LARGEST:
                raise ValueError(f"tree: {tuple(widths)} has more than {LARGEST} nodes")
            parents += [node for node in level for _ in range(width)]
            level = list(range(first, len(parents) + 1))
        return cls(tuple(parents))

    @property
    def size(self) -> int:
        """Drafted nodes, the anchor not among them."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of every node, the anchor's is 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        return self.depths[-1]

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of every node, likeliest first."""
        found: list[list[int]] = [[] for _ in range(self.size + 1)]
        for node, parent in enumerate(self.parents, start=1):
            found[parent].append(node)
        return tuple(map(tuple, found))

    @property
    def width(self) -> int:
        """The most children that a node has."""
        return max(map(len, self.children))

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Nodes that have children, by depth."""
        inner = [node for node, children in enumerate(self.children) if children]
        return tuple(tuple(node for node in inner if self.depths[node] == d) for d in range(self.depth))

    def path(self, node: int) -> list[int]:
        """The drafted nodes from the anchor to ``node``, itself the last."""
        found = []
        while node:
            found.append(node)
            node = self.parents[node - 1]
        return found[::-1]

    @cached_property
    def path_table(self) -> Tensor:
        """(size + 1, depth) drafted nodes from the anchor to every node, 0 behind its end."""
        paths = [self.path(node) for node in range(self.size + 1)]
        return torch.tensor([path + [0] * (self.depth - len(path)) for path in paths])

    def cut(self, depth: int) -> "Tree":
        """The tree without what lies deeper than ``depth`` ≥ 1; the nodes that stay keep their numbers."""
        return self if depth >= self.depth else Tree(self.parents[: sum(d <= depth for d in self.depths) - 1])

    @cached_property
    def children_table(self) -> Tensor:
        """(size + 1, width) children of every node, 0 where there is none."""
        table = torch.zeros(self.size + 1, self.width, dtype=torch.long)
        for node, children in enumerate(self.children):
            table[node, : len(children)] = torch.tensor(children, dtype=torch.long)
        return table

    @cached_property
    def inner_index(self) -> Tensor:
        """(size + 1,) place of every node among those that have children, −1 for leaves."""
        index = torch.full((self.size + 1,), -1)
        inner = [node for level in self.levels for node in level]
        index[inner] = torch.arange(len(inner))
        return index

    @cached_property
    def sees(self) -> Tensor:
        """(size + 1, size + 1): whether a node (row) attends to another: its ancestors and itself."""
        seen = torch.eye(self.size + 1, dtype=torch.bool)
        seen[:, 0] = True
        for node in range(1, self.size + 1):
            seen[node, self.path(node)] = True
        return seen
