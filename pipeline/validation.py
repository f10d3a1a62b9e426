"""Agreement on validation text by position of each response: means, slices, and the speed that it promises.

Sums and counts are kept and divided last. Where the target's text is greedy, a draft token is accepted if both have the
same best one; else with probability Σ min(p, q) at temperature 1, whatever the temperature of decoding will be.
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from pipeline.losses import Support, forward_kl, overlap_at_least, top1
from speculative.cost import Costs, rounds_needed

PLACES = (0, 16, 64, math.inf)  # positions in the response, from … up to
ENTROPIES = (0.0, 0.5, 2.0, math.inf)  # nats of the target


@dataclass
class Tally:
    """What one validation text has shown so far; ``greedy``: it was written at temperature 0."""

    greedy: bool
    _parts: list[Tensor] = field(default_factory=list)  # (N, 5): overlap, top1, KL, place, entropy
    _rows: list[int] = field(default_factory=list)

    def add(self, log_q: Tensor, target: Support, rows: list[int]) -> None:
        """Count N positions, ``rows[i]`` of them in response i, in row-major order."""
        place = torch.cat([torch.arange(count, device=log_q.device) for count in rows]).to(log_q.dtype)
        values = (overlap_at_least(log_q, target), top1(log_q, target), forward_kl(log_q, target), place, entropy(target))
        self._parts.append(torch.stack([value.to(log_q.dtype) for value in values], 1).double().cpu())
        self._rows += rows

    def means(self) -> dict[str, float]:
        """Overlap, top-1 agreement and forward KL, and the overlap by place in the response and by target entropy."""
        table = torch.cat(self._parts)
        found = dict(zip(("overlap", "top1", "forward_kl"), table[:, :3].mean(0).tolist(), strict=True))
        return found | _slices(table, 3, "position", PLACES) | _slices(table, 4, "entropy", ENTROPIES)

    def ratio(self, costs: Costs) -> float:
        """Plain time ÷ speculative time at the best K ≥ 1, as these positions promise at ``costs``.

        K = 0, which decoding may choose, would make all drafts equal that are not yet worth their cost.
        """
        accepted = torch.cat(self._parts)[:, 1 if self.greedy else 0].clamp(0, 1)
        texts = [row.tolist() for row in accepted.split(self._rows)]

        def at(drafts: int) -> float:
            return len(accepted) / (sum(rounds_needed(text, drafts) for text in texts) * costs.round(drafts))

        return max(at(drafts) for drafts in range(1, costs.longest + 1))


def entropy(target: Support) -> Tensor:
    """Nats of the target, (N,), all ids that are not stored or that the draft lacks being one outcome: a lower bound."""
    rest = (1 - target.p.sum(-1, keepdim=True)).clamp(min=0)
    return torch.special.entr(torch.cat([target.p, rest], 1)).sum(-1)


def _slices(table: Tensor, column: int, name: str, limits: tuple[float, ...]) -> dict[str, float]:
    """Mean overlap where ``column`` lies in [low, high); a slice without positions is left out."""
    found = {}
    for low, high in pairwise(limits):
        inside = (table[:, column] >= low) & (table[:, column] < high)
        if bool(inside.any()):
            found[f"overlap_{name}_{low:g}"] = float(table[inside, 0].mean())
    return found
