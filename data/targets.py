"""What every reader of the logit cache hands on: a target distribution by listed ids, or all of it.

Σ_x f(p(x), q(x)) is read from listed ids as Σ_i w_i f(p_i, q_i) (Horvitz & Thompson, 1952). Without weights the ids are
exact and the mass outside is known; with weights some were drawn, and they stand for everything outside.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SparseTargets:
    """Distributions at N positions: ``ids`` (N, k), their ``log_probs`` (N, k), and the log of the mass outside, (N,).

    ``weights`` (N, k): inverse inclusion weights, 1 for an id that was kept for certain; None: no id was drawn. Where ids
    were drawn, ``log_tail`` is −inf: nothing is left outside. A drawn id may stand in a row twice. The first ``certain``
    ids of a row were not drawn.
    """

    ids: Tensor
    log_probs: Tensor
    log_tail: Tensor
    weights: Tensor | None = None
    certain: int = 0

    def to(self, device: torch.device) -> "SparseTargets":
        weights = None if self.weights is None else self.weights.to(device)
        return SparseTargets(self.ids.to(device), self.log_probs.to(device), self.log_tail.to(device), weights, self.certain)


@dataclass(frozen=True)
class DenseTargets:
    """``log_probs`` (N, V): the whole distribution at N positions."""

    log_probs: Tensor

    def to(self, device: torch.device) -> "DenseTargets":
        return DenseTargets(self.log_probs.to(device))


Targets = SparseTargets | DenseTargets


def concatenate(parts: Sequence[Targets]) -> Targets:
    """The positions of all parts, which come from one codec, one after the other."""
    if isinstance(parts[0], DenseTargets):
        return DenseTargets(torch.cat([part.log_probs for part in parts]))
    most = max(part.certain for part in parts)
    parts = [_widened(part, most - part.certain) for part in parts]
    weights = None if parts[0].weights is None else torch.cat([part.weights for part in parts])
    ids, log_probs, log_tail = (torch.cat([getattr(p, name) for p in parts]) for name in ("ids", "log_probs", "log_tail"))
    return SparseTargets(ids, log_probs, log_tail, weights, parts[0].certain)


def _widened(part: SparseTargets, more: int) -> SparseTargets:
    """``part`` with ``more`` places for certain ids in each row: the first id again, with no mass."""
    if not more:
        return part

    def wider(tensor: Tensor, filler: Tensor) -> Tensor:
        return torch.cat([tensor[:, : part.certain], filler, tensor[:, part.certain :]], 1)

    none = torch.full_like(part.log_probs[:, :1].expand(-1, more), -torch.inf)
    weights = None if part.weights is None else wider(part.weights, torch.ones_like(none))
    ids = wider(part.ids, part.ids[:, :1].expand(-1, more))
    return SparseTargets(ids, wider(part.log_probs, none), part.log_tail, weights, part.certain + more)
