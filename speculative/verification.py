"""The acceptance rules: which drafted tokens stay and which token follows them.

Pure functions of distributions, drafted ids and uniform numbers; no model, no cache. Whatever the draft proposes, the
law of the committed tokens is the target's; the one rule of which this does not hold is in ``speculative.typical``. Shapes:
B rows, K drafted tokens, V target vocabulary, D draft vocabulary.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from speculative.sampling import draw


class Rule(StrEnum):
    """How drafts are judged above temperature 0; all but ``typical`` are exact, they differ in how much they keep.

    ``token``: rejection sampling, one draft after the other. ``block``: judged together, keeps as much or more.
    ``match``: the target draws, a draft stays if it is the same token; keeps less, but the output is that of plain
    decoding with the same seed, token for token. ``typical``: lossy, a draft stays if the target finds it likely enough.
    At temperature 0 all are one: a draft stays if it is the target's best token.
    """

    TOKEN = "token"
    BLOCK = "block"
    MATCH = "match"
    TYPICAL = "typical"


@dataclass(frozen=True)
class Verdict:
    """``accepted`` (B,): how many drafted tokens stay; ``following`` (B,): the correction or bonus token after them.

    ``path`` (B, depth): of a tree, the nodes that stay, 0 behind them; None of a chain.
    """

    accepted: Tensor
    following: Tensor
    path: Tensor | None = None


@dataclass(frozen=True)
class Guess:
    """What was drafted and from what: ``tokens`` (B, K) target ids, drawn from ``q`` (B, K, D).

    ``vocabulary`` (D,) is the sorted target id of each draft id, None when both vocabularies are one. ``certain`` (B,)
    marks rows whose tokens were named without a distribution: there q is one at the token and zero elsewhere. ``q`` is
    None when all are.
    """

    tokens: Tensor
    q: Tensor | None
    vocabulary: Tensor | None = None
    certain: Tensor | None = None

    @property
    def depth(self) -> int:
        """The most drafts that can stay, K."""
        return self.tokens.shape[1]

    @property
    def paths(self) -> list[range]:
        """For the anchor and each draft, the columns of ``tokens`` that lead to it, its own the last."""
        return [range(place) for place in range(self.depth + 1)]

    def at_tokens(self) -> Tensor:
        """q of the drafted tokens, (B, K) float64."""
        if self.q is None:
            return torch.ones_like(self.tokens, dtype=torch.float64)
        own = self.tokens if self.vocabulary is None else torch.searchsorted(self.vocabulary, self.tokens)
        # A token named without a distribution may lie outside the draft's vocabulary.
        q = self.q.gather(2, own.clamp(max=self.q.shape[2] - 1)[..., None]).squeeze(-1).double()
        return q if self.certain is None else torch.where(self.certain[:, None], 1.0, q)

    def excess(self, p: Tensor, place: Tensor) -> Tensor:
        """(p − q)⁺ for ``p`` (B, V) against the draft at ``place`` (B,); ids that the draft does not have count as q = 0."""
        row = torch.arange(len(p), device=p.device)
        named = torch.zeros_like(p).scatter_(1, self.tokens[row, place][:, None], 1.0)
        if self.q is None:
            return (p - named).clamp_(min=0.0)
        q = self.q[row, place].to(p.dtype)
        if self.certain is not None:
            q = torch.where(self.certain[:, None], 0.0, q)
            p = torch.where(self.certain[:, None], p - named, p)
        less = p - q if self.vocabulary is None else p.index_add(-1, self.vocabulary, q, alpha=-1)
        return less.clamp_(min=0.0)


def verify_choices(choices: Tensor, drafted: Tensor, limits: Tensor) -> Verdict:
    """Keep the drafted prefix that equals the target's own ``choices`` (B, K+1): its argmax, or its draws.

    ``drafted`` (B, K); ``limits`` (B,): drafts of each row that count, those behind are as if never proposed.
    """
    agree = (choices[:, :-1] == drafted).long()
    accepted = torch.minimum(agree.cumprod(-1).sum(-1), limits)
    return Verdict(accepted, choices.gather(1, accepted[:, None]).squeeze(1))


def verify_sampled(p: Tensor, guess: Guess, accept: Tensor, follow: Tensor, limits: Tensor, rule: Rule) -> Verdict:
    """Judge drafts above temperature 0.

    Args:
        p: (B, K+1, V) target distributions after all filters.
        guess: the drafts, with the distributions after all filters that they were drawn from.
        accept: (B, K) uniforms for the acceptance tests.
        follow: (B, K+1) uniforms for the token that follows; entry j is used when j drafted tokens stay.
        limits: (B,) drafts of each row that count; those behind are as if never proposed.
        rule: how they are judged, one of the exact rules.
    """
    if guess.tokens.shape[1] == 0:
        return Verdict(torch.zeros_like(limits), draw(p[:, 0], follow[:, 0]))
    if rule is Rule.MATCH:
        return verify_choices(draw(p, follow), guess.tokens, limits)
    row = torch.arange(len(p), device=p.device)
    ratio = p[:, :-1].gather(2, guess.tokens[..., None]).squeeze(-1).double() / guess.at_tokens()
    if rule is Rule.TOKEN:
        accepted, weight = _token(ratio, accept, limits), None
    else:
        accepted, weight = _block(p, guess, ratio, accept, limits)
    p_next = p[row, accepted]
    scaled = p_next if weight is None else weight[row, accepted, None].to(p.dtype) * p_next
    residual = guess.excess(scaled, accepted.clamp(max=guess.tokens.shape[1] - 1))
    # p = q up to rounding leaves no residual mass; a rejection then has probability zero up to rounding, and p is exact.
    whole = (accepted >= limits)[:, None] | (residual.sum(-1, keepdim=True) <= 0.0)
    return Verdict(accepted, draw(torch.where(whole, p_next, residual), follow[row, accepted]))


def _token(ratio: Tensor, accept: Tensor, limits: Tensor) -> Tensor:
    """Token x ~ q stays with probability min(1, p(x) / q(x)) (Leviathan et al., 2211.17192; Chen et al., 2302.01318)."""
    proposed = torch.arange(ratio.shape[1], device=ratio.device) < limits[:, None]
    return ((accept < ratio) & proposed).long().cumprod(-1).sum(-1)


def _block(p: Tensor, guess: Guess, ratio: Tensor, accept: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """Block verification (Sun et al., 2403.10444, algorithm 2): accepted (B,), and the weights w (B, K+1).

    w_0 = 1, w_i = min(1, w_{i−1} · p(x_i) / q(x_i)). The longest prefix i stays whose test passes:
    u_i < S_i / (S_i + 1 − w_i) with S_i = Σ (w_i p − q)⁺ after it, u < w at the end of the block. The residual is
    (w p − q)⁺.
    """
    weights = [torch.ones_like(ratio[:, 0])]
    accepted = torch.zeros_like(limits)
    for i in range(1, ratio.shape[1] + 1):
        weight = (weights[-1] * ratio[:, i - 1]).clamp(max=1.0)
        weights.append(weight)
        chance = weight
        if i < ratio.shape[1]:
            place = torch.full_like(limits, i)
            mass = guess.excess(weight[:, None].to(p.dtype) * p[:, i], place).sum(-1).double()
            # 0 / 0: p = q here and everything before was sure to stay, so a later test decides.
            inside = torch.where(mass + 1 - weight > 0, mass / (mass + 1 - weight), 1.0)
            chance = torch.where(limits == i, weight, inside)
        accepted = torch.where((accept[:, i - 1] < chance) & (limits >= i), i, accepted)
    return accepted, torch.stack(weights, 1)
