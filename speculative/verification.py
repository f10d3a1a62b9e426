"""The acceptance rules: which drafted tokens stay and which token follows them.

Pure functions of distributions, drafted ids and uniform numbers; no model, no cache. Whatever the draft proposes, the
law of the committed tokens is the target's (Leviathan et al., 2211.17192; Chen et al., 2302.01318).
Shapes: B rows, K drafted tokens, V target vocabulary, D draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from speculative.sampling import draw


@dataclass(frozen=True)
class Verdict:
    """``accepted`` (B,): how many drafted tokens stay; ``following`` (B,): the correction or bonus token after them."""

    accepted: Tensor
    following: Tensor


def verify_greedy(choices: Tensor, drafted: Tensor, limits: Tensor | None = None) -> Verdict:
    """Temperature 0: keep the drafted prefix that equals the target's own choices.

    Args:
        choices: (B, K+1) the target's argmax at every position of the block.
        drafted: (B, K) proposed ids.
        limits: (B,) drafts of each row that count; None: all K.
    """
    agree = (choices[:, :-1] == drafted).long()
    accepted = agree.cumprod(-1).sum(-1)
    accepted = accepted if limits is None else torch.minimum(accepted, limits)
    return Verdict(accepted, choices.gather(1, accepted[:, None]).squeeze(1))


def verify_sampled(
    p: Tensor,
    q: Tensor,
    drafted: Tensor,
    accept: Tensor,
    follow: Tensor,
    vocabulary: Tensor | None = None,
    limits: Tensor | None = None,
) -> Verdict:
    """Rejection sampling: token x ~ q stays with probability min(1, p(x) / q(x)), else (p − q)⁺ is drawn from.

    Args:
        p: (B, K+1, V) target distributions after all filters.
        q: (B, K, D) draft distributions after all filters, the ones that ``drafted`` was drawn from.
        drafted: (B, K) ids in the target's vocabulary.
        accept: (B, K) uniforms for the acceptance tests.
        follow: (B, K+1) uniforms for the token that follows; entry j is used when j drafted tokens stay.
        vocabulary: (D,) target id of each draft id; None when both vocabularies are one.
        limits: (B,) drafts of each row that count; those behind are as if never proposed. None: all K.
    """
    batch, length = drafted.shape
    row = torch.arange(batch, device=p.device)
    if length == 0:
        return Verdict(torch.zeros_like(row), draw(p[:, 0], follow[:, 0]))
    p_drafted = p[:, :-1].gather(2, drafted[..., None]).squeeze(-1)
    q_drafted = q.gather(2, _draft_ids(drafted, vocabulary)[..., None]).squeeze(-1)
    limits = torch.full_like(row, length) if limits is None else limits
    proposed = torch.arange(length, device=p.device) < limits[:, None]
    kept = (accept * q_drafted.double() < p_drafted.double()) & proposed
    accepted = kept.long().cumprod(-1).sum(-1)

    p_next = p[row, accepted]
    rejected = (accepted < limits)[:, None]
    q_next = torch.where(rejected, q[row, accepted.clamp(max=length - 1)], 0.0)
    residual = _subtract(p_next, q_next, vocabulary).clamp_(min=0.0)
    # p = q up to rounding leaves no residual mass; a rejection then has probability zero up to rounding, and p is exact.
    empty = residual.sum(-1, keepdim=True) <= 0.0
    following = draw(torch.where(empty, p_next, residual), follow[row, accepted])
    return Verdict(accepted, following)


def _draft_ids(drafted: Tensor, vocabulary: Tensor | None) -> Tensor:
    """Position of each drafted target id in the sorted draft vocabulary."""
    return drafted if vocabulary is None else torch.searchsorted(vocabulary, drafted)


def _subtract(p: Tensor, q: Tensor, vocabulary: Tensor | None) -> Tensor:
    """p − q over the target's vocabulary; ids that the draft does not have count as q = 0."""
    return p - q if vocabulary is None else p.index_add(-1, vocabulary, q, alpha=-1)
