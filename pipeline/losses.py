"""Objectives of distillation: pure float32 functions of the draft's log-probabilities and stored target distributions.

N positions, k stored ids, D draft ids. An id that the draft does not have cannot be learnt; p is restricted to the
rest and renormalised, so that the optimum of every objective is the best distribution the draft can express.

All ids without a stored p are one outcome, "any other id". For dense targets nothing is lost by it. For sparse ones
merging outcomes makes no divergence larger (data processing inequality): what is computed is exact on the merged
outcomes and a lower bound of the divergence on all ids, if the draft has the ids of the tail.

Where ids were drawn, Σ_x f(p(x), q(x)) is estimated by Σ_i w_i f(p_i, q_i), without bias if f(0, q) is nothing or linear in
q, since Σ q = 1 (Horvitz & Thompson, 1952). To renormalise p would bias it: a position then weighs as the mass that the
draft can say. These f are homogeneous and convex, so the best q stays the same. Where a factor multiplies such a sum, it is
taken over the ids that were kept for certain, so that it is no part of the draw. What follows q refuses drawn ids.

Nothing here knows masks, configuration or where p came from.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from data.targets import DenseTargets, Targets
from pipeline.errors import PipelineError

SMALLEST_REST = 1e-8  # of q on "any other id", which is 1 − Σ q: float32 knows it no better
SMALLEST_OVERLAP = 1e-2  # that divides a sum over drawn ids
SMALLEST_P = 1e-12  # that reverse KL sees, as in the tail that the cache stores; log 0 would not be finite


@dataclass(frozen=True)
class Support:
    """Stored targets in the draft's ids: ``ids`` (N, k), ``p`` (N, k), zero where the draft lacks the id, ``tail`` (N,).

    Where no id was drawn, the target's best id stands first. ``tail`` is the mass outside the stored ids. What share of it
    the draft could say is unknown; all of it counts. ``weights`` (N, k), where ids were drawn: Σ_i w_i f(p_i, q_i) is
    unbiased for Σ_x f(p(x), q(x)); then ``tail`` is 0. The first ``certain`` ids of a row were not drawn.
    """

    ids: Tensor
    p: Tensor
    tail: Tensor
    weights: Tensor | None = None
    certain: int = 0


def support(targets: Targets, draft_ids: Tensor | None) -> Support:
    """Translate stored ids; ``draft_ids`` (V,) is the draft id of each target id, −1 where there is none."""
    if isinstance(targets, DenseTargets):
        ids, p = _best_first(targets.log_probs.exp(), draft_ids)
        tail, weights, certain = torch.zeros_like(p[:, 0]), None, ids.shape[1]
    else:
        ids, p, tail, weights = targets.ids, targets.log_probs.exp(), targets.log_tail.exp(), targets.weights
        certain = targets.certain
    if draft_ids is None:
        return Support(ids, p, tail, weights, certain)
    ids = draft_ids[ids]
    return Support(ids.clamp(min=0), p * (ids >= 0), tail, weights, certain)


def _best_first(p: Tensor, draft_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """The best id, then the others that the draft has, (N, k), and their p; where the best one stood is another with no p."""
    best = p.argmax(-1, keepdim=True)
    others = torch.arange(p.shape[1], device=p.device) if draft_ids is None else (draft_ids[: p.shape[1]] >= 0).nonzero()[:, 0]
    ids = torch.cat([best, others.expand(len(p), -1)], 1)
    rest = torch.where(others == best, 0.0, p[:, others])
    return ids, torch.cat([p.gather(1, best), rest], 1)


@dataclass(frozen=True)
class _Outcomes:
    """p, log p (−∞ where p = 0) and log q, each (N, k + 1): stored ids, then "any other id"; (N, k) where ids were drawn.

    ``counts`` is false for a stored id of no p: its q is part of "any other". ``weights`` are 1 but where ids were drawn.
    """

    p: Tensor
    log_p: Tensor
    log_q: Tensor
    counts: Tensor
    weights: Tensor | float = 1.0

    def total(self, terms: Tensor) -> Tensor:
        return torch.where(self.counts, terms * self.weights, 0.0).sum(-1)

    def expected(self, differences: Tensor) -> Tensor:
        """Σ p · differences, (N,); 0 · ∞ counts as 0."""
        return torch.where(self.p != 0, self.p * self.weights * differences, 0.0).sum(-1)


def _outcomes(log_q: Tensor, target: Support) -> _Outcomes:
    kept = log_q.gather(1, target.ids)
    if target.weights is not None:
        return _Outcomes(target.p, target.p.log(), kept, target.p != 0, target.weights)
    total = target.p.sum(-1) + target.tail
    known = total != 0  # else the draft can say nothing of p: all of it is "any other", and there is nothing to learn
    total = torch.where(known, total, 1.0)
    p = torch.cat([target.p / total[:, None], torch.where(known, target.tail / total, 1.0)[:, None]], 1)
    stored = target.p > 0
    rest = (1 - (kept.exp() * stored).sum(-1, keepdim=True)).clamp(min=SMALLEST_REST)
    counts = torch.cat([stored, torch.ones_like(stored[:, :1])], 1)
    return _Outcomes(p, p.log(), torch.cat([kept, rest.log()], 1), counts)


def _certain_overlap(log_q: Tensor, target: Support) -> Tensor:
    """Σ min(p, q), (N,), over the ids that were kept whatever was drawn; a constant for the gradient."""
    kept = log_q.gather(1, target.ids[:, : target.certain]).exp()
    return torch.minimum(target.p[:, : target.certain], kept).sum(-1).detach()


def _refuse_drawn(target: Support) -> None:
    if target.weights is not None:
        raise ValueError("this objective follows the draft: the weights of drawn ids would have no bound")


def forward_kl(log_q: Tensor, target: Support) -> Tensor:
    """KL(p ‖ q) = Σ p log(p / q) by position, (N,), in nats (Kullback & Leibler, 1951; Hinton et al., 2015).

    Exact on dense targets, unbiased on drawn ids; else a lower bound. Without the tail the optimum would be the
    renormalised top k, and acceptance would be capped at its mass.
    """
    o = _outcomes(log_q, target)
    return o.expected(o.log_p - o.log_q)


def reverse_kl(log_q: Tensor, target: Support) -> Tensor:
    """KL(q ‖ p) = Σ q log(q / p) by position, (N,), in nats (Gu et al., MiniLLM, 2024). p below 1e-12 counts as 1e-12.

    Exact on dense targets with p ≥ 1e-12. On sparse ones a lower bound, short by any amount: it follows q to ids whose p
    was not stored. How q is spread within "any other id" is neither punished nor learnt. Drawn ids are refused, since
    their weights q / p have no bound.
    """
    _refuse_drawn(target)
    o = _outcomes(log_q, target)
    return o.total(o.log_q.exp() * (o.log_q - o.log_p.clamp(min=math.log(SMALLEST_P))))


def jensen_shannon(log_q: Tensor, target: Support, beta: float) -> Tensor:
    """β KL(p ‖ m) + (1 − β) KL(q ‖ m), m = βp + (1 − β)q, 0 < β < 1, by position, (N,), in nats (Agarwal et al., GKD, 2024).

    β = ½ is the Jensen–Shannon divergence (Lin, 1991), at most ln 2. Divided by β it tends to forward KL as β → 0.
    Exact on dense targets, unbiased on drawn ids; else a lower bound, short by βT (1 + log(1 + (1 − β)R / βT)) at most, T
    and R being the masses of p and q outside: the chain rule of the divergence, with the entropy of its mixture.
    """
    o = _outcomes(log_q, target)
    log_m = torch.logaddexp(o.log_p + math.log(beta), o.log_q + math.log(1 - beta))
    # Where p is 0, f is q times this: Σ q = 1 gives all of it at once, and what is left is 0 on ids that were not drawn.
    unseen = 0.0 if target.weights is None else -math.log(1 - beta)
    reverse = unseen + o.total(o.log_q.exp() * (o.log_q - log_m - unseen))
    return beta * o.expected(o.log_p - log_m) + (1 - beta) * reverse


def total_variation(log_q: Tensor, target: Support) -> Tensor:
    """½ Σ |p − q| = 1 − Σ min(p, q) by position, (N,): the chance that a drafted token is rejected (Leviathan et al., 2023).

    Exact on dense targets, unbiased on drawn ids; else a lower bound, short by the smaller of the two masses outside at
    most. Its gradient vanishes with the overlap.
    """
    o = _outcomes(log_q, target)
    if target.weights is not None:
        return 1 - o.total(torch.minimum(o.p, o.log_q.exp()))
    return o.total((o.p - o.log_q.exp()).abs()) / 2


def negative_log_overlap(log_q: Tensor, target: Support) -> Tensor:
    """−log Σ min(p, q) by position, (N,): total variation's direction, larger the smaller the overlap (LK losses, 2026).

    Exact on dense targets; else a lower bound, since the masses outside are taken to overlap as far as they can. The
    sum is taken of logarithms, so that a q too small for float32 still has a gradient. On drawn ids it is the tangent of
    −log at the overlap C of the certain ones, a lower bound in the mean: its gradient is −∇overlap / C without bias,
    whereas the mean of a logarithm is not the logarithm of the mean.
    """
    o = _outcomes(log_q, target)
    if target.weights is not None:
        certain = _certain_overlap(log_q, target).clamp(min=SMALLEST_OVERLAP)
        return 1 - certain.log() - o.total(torch.minimum(o.p, o.log_q.exp())) / certain
    return -torch.where(o.p != 0, torch.minimum(o.log_p, o.log_q), -math.inf).logsumexp(-1)


def hybrid(log_q: Tensor, target: Support, eta: float) -> Tensor:
    """w KL(p ‖ q) + (1 − w) TV(p, q), w = exp(−η · overlap), by position, (N,) (LK losses, 2026).

    KL leads while p and q are far apart, TV once they are near. w is a constant for the gradient. Exact on dense
    targets; on sparse ones KL, TV and w are lower bounds, their mixture need not be one. On drawn ids w is that of the
    overlap of the certain ones, and what it multiplies has no bias.
    """
    variation = total_variation(log_q, target)
    near = 1 - variation if target.weights is None else _certain_overlap(log_q, target)
    weight = torch.exp(-eta * near).detach()
    return weight * forward_kl(log_q, target) + (1 - weight) * variation


def cross_entropy(log_q: Tensor, ids: Tensor) -> Tensor:
    """−log q of the draft ids (N,) by position, (N,), in nats; −1 is an id that the draft lacks, and gives 0.

    It uses no distribution. On ids drawn from p its mean over draws is forward KL and a constant, with more variance.
    """
    return -torch.where(ids >= 0, log_q.gather(1, ids.clamp(min=0)[:, None])[:, 0], 0.0)


def weighted_mean(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Σ w v / Σ w over positions, (N,) each; without ``weights`` all count the same. A mask is a weight of 0 or 1.

    Raises:
        PipelineError: no position counts.
    """
    weights = torch.ones_like(values) if weights is None else weights
    total = weights.sum()
    if not total > 0:
        raise PipelineError("a batch has no position that counts, all are masked: give responses of at least one token")
    return torch.where(weights > 0, values * weights, 0.0).sum() / total


def overlap_at_least(log_q: Tensor, target: Support) -> Tensor:
    """Σ min(p, q) over the stored ids, (N,): a lower bound of the overlap, short of it by the smaller tail at most."""
    return torch.minimum(target.p, log_q.gather(1, target.ids).exp()).sum(-1)


def top1(log_q: Tensor, target: Support) -> Tensor:
    """Whether the draft's best id is the target's, (N,); an id the draft lacks is a miss."""
    # Stored ids are sorted by probability, so the target's best comes first; it is zero where the draft lacks it.
    return ((log_q.argmax(-1) == target.ids[:, 0]) & (target.p[:, 0] > 0)).float()
