"""What happened in decoding, kept as counts; every rate is derived, and divided last.

``rounds[proposed][accepted]`` counts verification rounds. Only committed tokens count: a draft behind a stop token or
behind the length limit was neither proposed nor accepted. Conventions in the field differ by one token: here
``tokens_per_round`` includes the correction or bonus token, as in the block efficiency of the papers. Of a tree every
depth counts as one draft, accepted when one of its branches is.
"""

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from speculative.tree import Tree

try:
    import resource
except ImportError:  # Windows
    resource = None


@dataclass(frozen=True)
class Acceptance:
    """Counts of one row or of many added up. ``emitted``: committed new tokens; ``rounds`` is (K+1) × (K+1)."""

    rounds: tuple[tuple[int, ...], ...]
    emitted: int

    @property
    def target_forwards(self) -> int:
        """Target forwards after prefill."""
        return sum(map(sum, self.rounds))

    @property
    def proposed(self) -> int:
        return sum(proposed * sum(row) for proposed, row in enumerate(self.rounds))

    @property
    def accepted(self) -> int:
        return sum(accepted * count for row in self.rounds for accepted, count in enumerate(row))

    @property
    def rate(self) -> float:
        """Accepted ÷ proposed drafts; depends on K. NaN when nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else float("nan")

    @property
    def tokens_per_round(self) -> float:
        """Emitted tokens ÷ target forwards after prefill."""
        return self.emitted / self.target_forwards if self.target_forwards else float("nan")

    @property
    def by_position(self) -> list[float]:
        """P(draft k accepted | drafts before it accepted, k proposed) for k = 1 … K; NaN where never reached."""
        rates = []
        for k in range(1, len(self.rounds)):
            reached = [row[k - 1 :] for proposed, row in enumerate(self.rounds) if proposed >= k]
            trials, kept = sum(map(sum, reached)), sum(sum(row[1:]) for row in reached)
            rates.append(kept / trials if trials else float("nan"))
        return rates


def total(parts: Iterable[Acceptance]) -> Acceptance:
    """Counts of all parts together; parts may have different K."""
    parts = list(parts)
    size = max((len(part.rounds) for part in parts), default=1)
    rounds = [[0] * size for _ in range(size)]
    for part in parts:
        for proposed, row in enumerate(part.rounds):
            for accepted, count in enumerate(row):
                rounds[proposed][accepted] += count
    return Acceptance(tuple(map(tuple, rounds)), sum(part.emitted for part in parts))


@dataclass(frozen=True)
class Ranks:
    """How often a child of each depth and rank was ``tried``, its parent having stayed, and ``kept``; (depth, width) each."""

    tried: tuple[tuple[int, ...], ...]
    kept: tuple[tuple[int, ...], ...]

    @property
    def rates(self) -> list[list[float]]:
        """P(the child of this depth and rank stays | its parent stayed); 0 where none was tried."""
        rows = zip(self.kept, self.tried, strict=True)
        return [[k / t if t else 0.0 for k, t in zip(kept, tried, strict=True)] for kept, tried in rows]


@dataclass
class Phases:
    """Wall seconds by phase; ``bookkeeping`` is what a round does that is neither a model nor a draw.

    Their sum is the time of the prefills and of the rounds. Reading the input, making the token buffers, trying a draft that is
    new and gathering the result come on top.
    """

    prefill: float = 0.0
    draft: float = 0.0
    target: float = 0.0
    sample: float = 0.0
    bookkeeping: float = 0.0

    @property
    def other(self) -> float:
        """What a round needs beside the forwards of both models."""
        return self.sample + self.bookkeeping

    @property
    def decoding(self) -> float:
        return self.draft + self.target + self.other

    def since(self, before: "Phases") -> "Phases":
        """What was added to ``before``."""
        return Phases(**{name: seconds - getattr(before, name) for name, seconds in asdict(self).items()})


def peak_memory(device: torch.device) -> int | None:
    """The most bytes held so far: by PyTorch on a CUDA device, else by this process; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Log:
    """Collects the rounds of a batch."""

    def __init__(self, rows: int, depth: int, tree: Tree | None = None) -> None:
        self.rounds = torch.zeros(rows, depth + 1, depth + 1, dtype=torch.long)
        self.emitted = torch.zeros(rows, dtype=torch.long)
        self.tree = tree
        if tree is not None:
            self.tried, self.kept = torch.zeros(2, tree.depth, tree.width, dtype=torch.long)

    def add(self, index: Tensor, proposed: Tensor, accepted: Tensor, emitted: Tensor, path: Tensor | None = None) -> None:
        """One round of the rows ``index`` (B,): drafts ``proposed`` and ``accepted``, tokens ``emitted``, all (B,).

        ``path`` (B, depth): the nodes of the tree that stayed.
        """
        index, proposed, accepted, emitted = (counts.cpu() for counts in (index, proposed, accepted, emitted))
        cut = emitted <= accepted
        proposed = torch.where(cut, emitted, proposed)
        accepted = torch.where(cut, emitted, accepted)
        self.rounds[index, proposed, accepted] += 1
        self.emitted[index] += emitted
        if path is not None:
            self._add_ranks(torch.nn.functional.pad(path.cpu(), (1, 0)), proposed, accepted)

    def _add_ranks(self, nodes: Tensor, proposed: Tensor, accepted: Tensor) -> None:
        for depth in range(1, nodes.shape[1]):
            tried = (accepted >= depth - 1) & (proposed >= depth)
            children = self.tree.children_table[nodes[:, depth - 1]]
            self.tried[depth - 1] += ((children > 0) & tried[:, None]).sum(0)
            stays = (children == nodes[:, depth : depth + 1]) & (accepted >= depth)[:, None]
            self.kept[depth - 1] += stays.sum(0)

    def ranks(self) -> Ranks | None:
        """Counts by depth and rank, of a tree."""
        if self.tree is None:
            return None
        return Ranks(*(tuple(map(tuple, counts.tolist())) for counts in (self.tried, self.kept)))

    def by_row(self) -> list[Acceptance]:
        return [
            Acceptance(tuple(map(tuple, rounds)), emitted)
            for rounds, emitted in zip(self.rounds.tolist(), self.emitted.tolist(), strict=True)
        ]
