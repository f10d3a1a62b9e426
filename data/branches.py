"""Continuations beside a text: a row that holds a trunk, and behind it branches that leave it here and there.

A branch that leaves at ``cut`` stands where trunk token ``cut`` would: it sees the trunk before that, and itself. One pass
over the row gives for every branch what a pass over trunk[:cut] + branch would. It knows no model and no distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TRUNK, PADDING = -1, -2  # in the place of a cut


@dataclass(frozen=True)
class Branched:
    """Rows right-padded to one width: ``tokens``, ``positions`` and ``cuts``, each (B, T).

    ``cuts`` says for each token of a branch where that left the trunk, and TRUNK or PADDING of the others. No two branches
    of a row leave at one place.
    """

    tokens: Tensor
    positions: Tensor
    cuts: Tensor

    def mask(self) -> Tensor:
        """(B, 1, T, T): whether a token (first T) sees another; padding sees itself, so that no row is empty."""
        to, to_cut = self.positions[:, None, :], self.cuts[:, None, :]
        at, cut = self.positions[:, :, None], self.cuts[:, :, None]
        before = torch.where(cut == TRUNK, to <= at, to < cut)
        own = (to_cut == cut) & (to <= at)
        sees = torch.where(to_cut == TRUNK, before & (cut != PADDING), own & (to_cut != PADDING))
        return (sees | torch.eye(to.shape[-1], dtype=torch.bool, device=sees.device))[:, None]


def beside(trunks: Sequence[Sequence[int]], branches: Sequence[Sequence[tuple[int, Sequence[int]]]]) -> Branched:
    """Rows of a trunk each and its ``branches``, a cut and the tokens that stand there; branch after branch."""
    rows = []
    for trunk, leaving in zip(trunks, branches, strict=True):
        tokens, positions, cuts = list(trunk), list(range(len(trunk))), [TRUNK] * len(trunk)
        for cut, branch in leaving:
            tokens += branch
            positions += range(cut, cut + len(branch))
            cuts += [cut] * len(branch)
        rows.append((tokens, positions, cuts))
    width = max(len(tokens) for tokens, _, _ in rows)
    fillers = (0, 0, PADDING)
    padded = [[part + [filler] * (width - len(part)) for part, filler in zip(row, fillers, strict=True)] for row in rows]
    return Branched(*(torch.tensor(list(column)) for column in zip(*padded, strict=True)))
