"""Next-token distributions and the draws from them.

One function turns logits into the distribution that is drawn from; the acceptance ratio and the residual use the very
same tensor, which is what exactness rests on. Uniform numbers are a hash of (seed, row, position, purpose), so a row's
output depends neither on its neighbours nor on any global generator.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class Purpose(IntEnum):
    """What a uniform number decides; numbers of different purposes are independent."""

    DRAFT = 1
    ACCEPT = 2
    TARGET = 3


@dataclass(frozen=True)
class Sampling:
    """Temperature and filters, applied to target and draft alike. Temperature 0 is greedy decoding.

    ``top_k=0``, ``top_p=1``, ``min_p=0`` and ``typical_p=1`` switch a filter off. They follow the temperature in this
    order, each on what the one before left, as in transformers.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a finite number ≥ 0, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be ≥ 0 (0 switches it off), not {self.top_k}")
        for name in ("top_p", "typical_p"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in (0, 1], not {getattr(self, name)}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must lie in [0, 1], not {self.min_p}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that is drawn from: float32, same shape as ``logits`` (..., V), each row summing to one.

    Raises:
        ValueError: a row of logits without a finite maximum (NaN, or every token excluded).
    """
    if sampling.greedy:
        return torch.nn.functional.one_hot(best_token(logits), logits.shape[-1]).float()
    logits = logits.float()
    if sampling.temperature != 1.0:
        # The maximum first, or a temperature near 0 would overflow.
        logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        threshold = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if sampling.top_p < 1.0:
        logits = _nucleus(logits, sampling.top_p)
    if sampling.min_p > 0.0:
        probability = logits.softmax(-1)
        logits = logits.masked_fill(probability < sampling.min_p * probability.amax(-1, keepdim=True), -torch.inf)
    if sampling.typical_p < 1.0:
        logits = _typical(logits, sampling.typical_p)
    p = logits.softmax(-1)
    _refuse_unless_finite(p[..., 0])  # one entry tells: no number stays one in a softmax over NaN or +∞, or over −∞ alone
    return p


def best_token(logits: Tensor) -> Tensor:
    """The id of the largest logit, (...) of (..., V); the first of equal ones.

    Raises:
        ValueError: as ``probabilities`` does.
    """
    best, choice = logits.max(-1)
    _refuse_unless_finite(best)
    return choice


def _refuse_unless_finite(values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise ValueError("the model gave logits that are NaN or infinite, or every token is excluded")


_PARTIAL = 512  # tokens that are sorted first; the nucleus rarely needs more


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of tokens whose mass reaches ``top_p`` (Holtzman et al., 2020); at least one stays."""
    log_normalizer = logits.logsumexp(-1, keepdim=True)
    size = min(_PARTIAL, logits.shape[-1])
    ordered, order = logits.topk(size, dim=-1)
    mass = (ordered - log_normalizer).exp()
    if size < logits.shape[-1] and bool((mass.sum(-1) < top_p).any()):
        ordered, order = logits.sort(dim=-1, descending=True)
        mass = (ordered - log_normalizer).exp()
    inside = mass.cumsum(-1) - mass < top_p
    kept = ordered.masked_fill(~inside, -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter(-1, order, kept)


def _typical(logits: Tensor, typical_p: float) -> Tensor:
    """Keep the tokens whose surprise is nearest the entropy, until their mass reaches ``typical_p`` (Meister, 2202.00666)."""
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1, keepdim=True)
    order = (-log_p - entropy).abs().argsort(dim=-1, stable=True)
    mass = p.gather(-1, order)
    outside = mass.cumsum(-1) - mass >= typical_p
    return logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw: ids (...) from unnormalised ``weights`` (..., V) and ``uniform`` (...) in [0, 1).

    Two levels, block sums and then one block, for a running sum over the whole vocabulary is slow. A token of zero
    weight is never drawn: its step of the CDF has no width, and neither has that of a block of zeros.
    """
    short = -weights.shape[-1] % _BLOCK
    blocks = (torch.nn.functional.pad(weights, (0, short)) if short else weights).unflatten(-1, (-1, _BLOCK))
    outer = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    point = (uniform.double() * outer[..., -1]).unsqueeze(-1)
    block = torch.searchsorted(outer, point, right=True).clamp_(max=outer.shape[-1] - 1)
    chosen = blocks.gather(-2, block.unsqueeze(-1).expand(*block.shape, _BLOCK)).squeeze(-2)
    inner = chosen.cumsum(-1, dtype=torch.float64)
    before = torch.where(block > 0, outer.gather(-1, (block - 1).clamp(min=0)), 0.0)
    # Rounding must not carry the point past the block's last token of positive weight.
    below = torch.nextafter(inner[..., -1:], torch.zeros_like(before))
    place = torch.searchsorted(inner, torch.minimum((point - before).clamp_(min=0.0), below), right=True)
    return (block * _BLOCK + place).squeeze(-1)


_BLOCK = 256


def uniforms(seed: int, rows: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """Float64 numbers in [0, 1), one for each (row, position), a pure function of the arguments.

    ``rows`` and ``positions`` are integer tensors that broadcast. The mixer is the finaliser of SplitMix64
    (Steele et al., 2014), applied once per key.
    """
    state = torch.full_like(positions, _wrap(seed * 4 + int(purpose)), dtype=torch.int64)
    for key in (rows, positions):
        state = _mix(state ^ (key.to(torch.int64) + 1) * _GOLDEN)
    return ((state >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def round_keys(lengths: Tensor, places: Tensor | int) -> Tensor:
    """Keys, for use as positions, of ``places`` in the round that begins at ``lengths``: no other round has them.

    A position is drafted again when it was rejected; by then its first numbers may have had a say in what was kept.
    """
    return (lengths << 20) + places


def _wrap(value: int) -> int:
    """The signed 64-bit integer with the bits of ``value``."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


_GOLDEN = _wrap(0x9E3779B97F4A7C15)
_FIRST = _wrap(0xBF58476D1CE4E5B9)
_SECOND = _wrap(0x94D049BB133111EB)


def _mix(state: Tensor) -> Tensor:
    state = (state ^ ((state >> 30) & ((1 << 34) - 1))) * _FIRST
    state = (state ^ ((state >> 27) & ((1 << 37) - 1))) * _SECOND
    return state ^ ((state >> 31) & ((1 << 33) - 1))
