"""Teacher-forced agreement of a draft with its target, position by position.

Σ min(p, q) = 1 − TV(p, q) is the exact probability that one drafted token is accepted; the divergences are the usual
proxies. Inputs are the distributions that decoding draws from. Results are per-position values, averaged by the caller.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Agreement:
    """One value for each of N positions, float32.

    ``forward_kl``, ``reverse_kl`` (nats) and ``jensen_shannon`` compare q with p restricted to the draft's vocabulary
    and renormalised, for q is zero elsewhere; ``vocabulary_mass`` is the p-mass that this restriction keeps. Overlap,
    total variation and top-1 compare with the whole p.
    """

    forward_kl: Tensor
    reverse_kl: Tensor
    jensen_shannon: Tensor
    total_variation: Tensor
    overlap: Tensor
    top1: Tensor
    vocabulary_mass: Tensor


def agreement(target_logits: Tensor, draft_logits: Tensor, vocabulary: Tensor | None = None) -> Agreement:
    """Compare (N, V) target logits with (N, D) draft logits, both already divided by the temperature.

    Args:
        target_logits: (N, V).
        draft_logits: (N, D).
        vocabulary: (D,) target id of each draft id; None when D = V.
    """
    log_p = target_logits.float().log_softmax(-1)
    log_q = draft_logits.float().log_softmax(-1)
    inside = log_p if vocabulary is None else log_p[:, vocabulary]
    mass = inside.logsumexp(-1, keepdim=True)
    log_r = inside - mass  # p restricted to the draft's vocabulary
    overlap = torch.minimum(inside, log_q).exp().sum(-1)
    best = log_q.argmax(-1) if vocabulary is None else vocabulary[log_q.argmax(-1)]
    middle = torch.logaddexp(log_r, log_q) - torch.log(torch.tensor(2.0))
    return Agreement(
        forward_kl=_kl(log_r, log_q),
        reverse_kl=_kl(log_q, log_r),
        jensen_shannon=(_kl(log_r, middle) + _kl(log_q, middle)) / 2,
        total_variation=1 - overlap,
        overlap=overlap,
        top1=(log_p.argmax(-1) == best).float(),
        vocabulary_mass=mass.squeeze(-1).exp(),
    )


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) over the last axis; 0 · log 0 counts as 0."""
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
