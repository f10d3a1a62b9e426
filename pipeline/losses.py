"""Objectives of distillation: pure float32 functions of the draft's log-probabilities and stored target distributions.

N positions, k stored ids, D draft ids. An id that the draft does not have cannot be learnt; p is restricted to the
rest and renormalised, so that the optimum of every objective is the best distribution the draft can express.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from data.targets import DenseTargets, Targets


@dataclass(frozen=True)
class Support:
    """Stored targets in the draft's ids: ``ids`` (N, k), ``p`` (N, k), zero where the draft lacks the id, ``tail`` (N,).

    ``tail`` is the mass outside the stored ids. What share of it the draft could say is unknown; all of it counts.
    ``weights`` (N, k), where ids were drawn: Σ_i w_i f(p_i, q_i) is unbiased for Σ_x f(p(x), q(x)); then ``tail`` is 0.
    """

    ids: Tensor
    p: Tensor
    tail: Tensor
    weights: Tensor | None = None


def support(targets: Targets, draft_ids: Tensor | None) -> Support:
    """Translate stored ids; ``draft_ids`` (V,) is the draft id of each target id, −1 where there is none.

    Unbiased with weights: every Σ_x f(p(x), q(x)), f(0, ·) = 0. Not: what divides by Σ w p, where the draft lacks ids.
    """
    if isinstance(targets, DenseTargets):
        ids, p = _best_first(targets.log_probs.exp())
        tail, weights = torch.zeros_like(p[:, 0]), None
    else:
        ids, p, tail, weights = targets.ids, targets.log_probs.exp(), targets.log_tail.exp(), targets.weights
    if draft_ids is None:
        return Support(ids, p, tail, weights)
    ids = draft_ids[ids]
    return Support(ids.clamp(min=0), p * (ids >= 0), tail, weights)


def _best_first(p: Tensor) -> tuple[Tensor, Tensor]:
    """All ids (N, V) and their p, the best one in front: it changes places with id 0."""
    best = p.argmax(-1, keepdim=True)
    ids = torch.arange(p.shape[1], device=p.device).expand_as(p).scatter(1, best, 0)
    ids = torch.cat([best, ids[:, 1:]], 1)
    return ids, p.gather(1, ids)


def forward_kl(log_q: Tensor, target: Support) -> Tensor:
    """KL(p ‖ q) by position, (N,), on the stored ids and one outcome "any other id".

    Σ_i p_i log(p_i / q_i) + p_tail log(p_tail / q_tail), p renormalised over what the draft can say. Without the tail
    the optimum would be the renormalised top k, and acceptance would be capped at its mass.
    """
    total = target.p.sum(-1) + target.tail
    p, tail = target.p / total[:, None], target.tail / total
    log_kept = log_q.gather(1, target.ids)
    q_tail = (1 - (log_kept.exp() * (p > 0)).sum(-1)).clamp(min=1e-8)
    inner = torch.where(p > 0, p * (p.clamp(min=1e-30).log() - log_kept), 0.0).sum(-1)
    return inner + tail * (tail.clamp(min=1e-30).log() - q_tail.log())


def overlap_at_least(log_q: Tensor, target: Support) -> Tensor:
    """Σ min(p, q) over the stored ids, (N,): a lower bound of the overlap, short of it by the smaller tail at most."""
    return torch.minimum(target.p, log_q.gather(1, target.ids).exp()).sum(-1)


def top1(log_q: Tensor, target: Support) -> Tensor:
    """Whether the draft's best id is the target's, (N,); an id the draft lacks is a miss."""
    # Stored ids are sorted by probability, so the target's best comes first; it is zero where the draft lacks it.
    return ((log_q.argmax(-1) == target.ids[:, 0]) & (target.p[:, 0] > 0)).float()
