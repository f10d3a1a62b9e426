"""What a codec loses, against the dense distributions of a sample: KL, the estimated overlap of a draft, a hard interval.

An id that was kept, for certain or by a draw, is known exactly. So Σ min(p, q) over the known ids is a lower bound of the
overlap, and that plus the smaller of the two masses outside is an upper bound, whatever was drawn.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from data.targets import DenseTargets, Targets


@dataclass(frozen=True)
class Fidelity:
    """Means over ``positions``; ``overlap_bias`` is estimated minus dense overlap, with its ``overlap_standard_error``."""

    positions: int
    kl: float
    overlap: float
    overlap_estimated: float
    overlap_bias: float
    overlap_standard_error: float
    overlap_lower: float
    overlap_upper: float


def measures(log_p: Tensor, targets: Targets, log_q: Tensor) -> Tensor:
    """By position, (N, 5): KL, and of the overlap of ``log_q`` with dense ``log_p`` (N, V): dense, estimated, lower, upper."""
    p, q = log_p.double().exp(), log_q.double().exp()
    known, where = known_mass(targets, log_p.shape[1])
    lower = torch.minimum(known, q).sum(-1)
    outside = torch.minimum((1 - known.sum(-1)).clamp(min=0), (1 - (q * where).sum(-1)).clamp(min=0))
    dense = torch.minimum(p, q).sum(-1)
    return torch.stack([divergence(log_p, known, where), dense, overlap(targets, log_q), lower, lower + outside], 1)


def summary(measured: Tensor) -> Fidelity:
    """Means of the rows of ``measures``."""
    kl, dense, estimated, lower, upper = measured.mean(0).tolist()
    spread = (measured[:, 2] - measured[:, 1]).std(correction=0).item()
    count = len(measured)
    return Fidelity(count, kl, dense, estimated, estimated - dense, spread / count**0.5, lower, upper)


def overlap(targets: Targets, log_q: Tensor) -> Tensor:
    """Σ min(p, q) by position (N,), estimated from the stored ids: unbiased if some were drawn, a lower bound if not."""
    q = log_q.double().exp()
    if isinstance(targets, DenseTargets):
        return torch.minimum(targets.log_probs.double().exp(), q).sum(-1)
    least = torch.minimum(targets.log_probs.double().exp(), q.gather(1, targets.ids))
    return (least if targets.weights is None else least * targets.weights).sum(-1)


def known_mass(targets: Targets, vocabulary: int) -> tuple[Tensor, Tensor]:
    """p (N, V) where it is stored and 0 elsewhere, in float64, and the mask (N, V) of where it is stored."""
    if isinstance(targets, DenseTargets):
        known = targets.log_probs.double().exp()
        return known, torch.ones_like(known, dtype=torch.bool)
    empty = torch.zeros(len(targets.ids), vocabulary, dtype=torch.float64)
    # A drawn id may stand twice, and one of no weight beside its exact self: the largest is the stored one.
    known = empty.scatter_reduce(1, targets.ids, targets.log_probs.double().exp(), "amax")
    return known, empty.bool().scatter(1, targets.ids, True)


def divergence(log_p: Tensor, known: Tensor, where: Tensor) -> Tensor:
    """KL(dense ‖ reconstructed) in nats, (N,): ids that are not known share the mass outside evenly."""
    others = (~where).sum(-1, keepdim=True)
    outside = (1 - known.sum(-1, keepdim=True)).clamp(min=1e-12)
    rebuilt = torch.where(where, known, outside / others.clamp(min=1))
    rebuilt = rebuilt / rebuilt.sum(-1, keepdim=True)
    p = log_p.double().exp()
    return torch.where(p > 0, p * (log_p.double() - rebuilt.clamp(min=1e-300).log()), 0.0).sum(-1)


def noisy(log_p: Tensor, scale: float, seed: int) -> Tensor:
    """A stand-in for a draft: log-probabilities (N, V) of p with Gaussian noise of ``scale`` on its logits."""
    noise = torch.randn(log_p.shape, generator=torch.Generator().manual_seed(seed))
    return (log_p + scale * noise).log_softmax(-1)
