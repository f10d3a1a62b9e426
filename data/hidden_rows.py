"""The target's hidden states at response positions, read from a cache of codec hidden: what heads on the target learn from.

``states[j]`` is what the target's head read to choose response token j, so the state at j + k says what the target thinks
of the token k further on. It knows no distribution and no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from data.logit_cache import LogitCache


@dataclass(frozen=True)
class HiddenRow:
    """One response: ``tokens`` (N,) ids and ``states`` (N, d)."""

    tokens: Tensor
    states: Tensor


@dataclass(frozen=True)
class HiddenBatch:
    """``tokens`` (N,) and ``states`` (N, d) of all rows, one after the other; ``rows[i]`` positions are of row i."""

    tokens: Tensor
    states: Tensor
    rows: tuple[int, ...]

    def to(self, device: torch.device) -> "HiddenBatch":
        return HiddenBatch(self.tokens.to(device), self.states.to(device), self.rows)

    def ahead(self, distance: int) -> tuple[Tensor, Tensor]:
        """Places (M,) of all positions that have one ``distance`` further on in their row, and the places (M,) of those."""
        first, places = 0, []
        for count in self.rows:
            places.append(torch.arange(first, first + max(count - distance, 0)))
            first += count
        found = torch.cat(places).to(self.tokens.device)
        return found, found + distance


class HiddenRows(Dataset[HiddenRow]):
    """The rows of ``cache`` with at least ``shortest`` response tokens."""

    def __init__(self, cache: LogitCache, shortest: int = 1) -> None:
        self.cache = cache
        counts = [length - start for length, start in zip(cache.lengths, cache.starts, strict=True)]
        self.index = [place for place, count in enumerate(counts) if count >= shortest]
        self.lengths = [counts[place] for place in self.index]

    @property
    def positions(self) -> int:
        """Number of response positions."""
        return sum(self.lengths)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, place: int) -> HiddenRow:
        return HiddenRow(*self.cache.states(self.index[place]))


def collate(rows: Sequence[HiddenRow]) -> HiddenBatch:
    tokens, states = torch.cat([row.tokens for row in rows]), torch.cat([row.states for row in rows])
    return HiddenBatch(tokens, states, tuple(len(row.tokens) for row in rows))
