"""Batches for distillation: rows of similar length together, in an order that depends on the seed and epoch alone.

The training order is one long list of batches, so a resumed run starts at a step number and sees what it would have
seen. Padding is to the right: a causal model never looks at it, and no loss is taken there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from data.branches import Branched, beside
from data.logit_cache import Row
from data.targets import Targets, concatenate


@dataclass(frozen=True)
class Batch:
    """``tokens`` (B, T) right-padded; ``predicts`` (B, T) marks positions whose next token is a response token.

    ``targets`` are the distributions at the marked positions, in row-major order. Of rows with branches, ``branched`` is
    their layout, ``predicts`` marks their tokens, whose successors nobody wrote, and ``weights`` (N,) is how likely decoding
    gets there.
    """

    tokens: Tensor
    predicts: Tensor
    targets: Targets
    branched: Branched | None = None
    weights: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        moved = Batch(self.tokens.to(device), self.predicts.to(device), self.targets.to(device))
        if self.branched is None:
            return moved
        layout = Branched(moved.tokens, self.branched.positions.to(device), self.branched.cuts.to(device))
        return replace(moved, branched=layout, weights=self.weights.to(device))


def collate(rows: Sequence[Row]) -> Batch:
    """Pad rows to the longest and mark where each token of a response is predicted: one position earlier."""
    if rows[0].cuts is not None:
        return _collate_branches(rows)
    width = max(len(row.tokens) for row in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    predicts = torch.zeros(len(rows), width, dtype=torch.bool)
    for place, row in enumerate(rows):
        tokens[place, : len(row.tokens)] = row.tokens
        predicts[place, row.start - 1 : len(row.tokens) - 1] = True
    return Batch(tokens, predicts, concatenate([row.targets for row in rows]))


def _collate_branches(rows: Sequence[Row]) -> Batch:
    trunks = [row.tokens[: row.start].tolist() for row in rows]
    branches = []
    for row in rows:
        cuts, counts = row.cuts.unique_consecutive(return_counts=True)
        parts = row.tokens[row.start :].split(counts.tolist())
        branches.append([(cut, part.tolist()) for cut, part in zip(cuts.tolist(), parts, strict=True)])
    layout = beside(trunks, branches)
    weights = torch.cat([row.survival for row in rows]).float()
    return Batch(layout.tokens, layout.cuts >= 0, concatenate([row.targets for row in rows]), layout, weights)


class LengthGroupedBatches(Sampler[list[int]]):
    """``steps`` batches of row indices over as many epochs as that takes, beginning at batch ``start``.

    The last batch of an epoch, if it has fewer rows than ``least``, joins the one before it.
    """

    WINDOW = 16  # batches sorted by length together; the larger, the less padding and the less mixing

    def __init__(self, lengths: Sequence[int], size: int, steps: int, seed: int, start: int = 0, least: int = 1) -> None:
        if len(lengths) < max(least, 1):
            raise ValueError(f"{len(lengths)} rows make no batches of {max(least, 1)} or more")
        self.lengths, self.size, self.steps, self.seed, self.start = lengths, size, steps, seed, start
        self.least = least

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        step = 0
        epoch = 0
        while step < self.steps:
            for batch in self._epoch(epoch)[: self.steps - step]:
                if step >= self.start:
                    yield batch
                step += 1
            epoch += 1

    def _epoch(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        window = self.size * self.WINDOW
        batches = []
        for first in range(0, len(order), window):
            rows = sorted(order[first : first + window], key=self.lengths.__getitem__)
            batches += [rows[i : i + self.size] for i in range(0, len(rows), self.size)]
        if len(batches) > 1 and len(batches[-1]) < self.least:
            short = batches.pop()
            batches[-1] += short
        mixed = torch.randperm(len(batches), generator=generator).tolist()
        return [batches[i] for i in mixed]


class Mixed(Sampler[list[int]]):
    """Batches of two samplers over one row of data sets: a ``share`` of them, evenly spread, from ``second``.

    Rows of ``second`` are counted from ``first_rows``, the number of rows of the first. Both are read from their beginning,
    so a start is a number of batches here.
    """

    def __init__(
        self, first: LengthGroupedBatches, second: LengthGroupedBatches, first_rows: int, share: float, start: int = 0
    ) -> None:
        self.first, self.second, self.first_rows, self.share, self.start = first, second, first_rows, share, start

    def __len__(self) -> int:
        return len(self.first)

    def __iter__(self) -> Iterator[list[int]]:
        first, second = iter(self.first), iter(self.second)
        for step in range(len(self)):
            turn = int((step + 1) * self.share) > int(step * self.share)
            batch = [self.first_rows + row for row in next(second)] if turn else next(first)
            if step >= self.start:
                yield batch


class Divided(Sampler[list[int]]):
    """Of each batch the rows that this process has to do: every n-th, of n processes that train together."""

    def __init__(self, batches: Sampler[list[int]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        together = dist.is_available() and dist.is_initialized()
        first, step = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        for batch in self.batches:
            yield batch[first::step]
