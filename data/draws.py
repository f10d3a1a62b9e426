"""Random draws that depend on (seed, row key, position) alone, so that a resumed cache has the same bytes.

A counter is hashed to a uniform number (SplitMix64: Steele, Lea & Flood, 2014), and the number is looked up in the running
sum of the distribution. There is no generator state, so batches may be cut in any way.
"""

import math

import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_RESOLUTION = 48  # bits: fine enough for any vocabulary, and u · total stays below the total after rounding
_BLOCK = 256  # ids that are summed together
_CELLS = 1 << 22  # float64 cells of running sums held at once


def uniforms(seed: int, key: int, positions: int, count: int) -> Tensor:
    """Numbers in (0, 1), (positions, count) in float64; row j is that of position j whatever ``positions`` is."""
    start = _mix(torch.tensor(_signed((seed * _GOLDEN + key) & _MASK)))
    rows = _mix(start + torch.arange(positions)[:, None] * _signed(_GOLDEN))
    hashed = _mix(rows + torch.arange(1, count + 1) * _signed(_GOLDEN))
    return ((hashed & ((1 << _RESOLUTION) - 1)).double() + 0.5) / (1 << _RESOLUTION)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Ids (N, m) with chance ∝ ``weights`` (N, V) ≥ 0, with replacement; a row without any weight gives id 0."""
    chunk = max(1, _CELLS // (_BLOCK * uniform.shape[1] + weights.shape[1] // _BLOCK + 1))
    return torch.cat([_draw(w, u) for w, u in zip(weights.split(chunk), uniform.split(chunk), strict=True)])


def from_tail(rest: Tensor, log_probs: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Ids (N, m) drawn from the tail ``rest`` (N, V), in any unit, and their ``log_probs`` of (N, V).

    A row whose tail is empty draws id 0: with −inf it gets no weight.
    """
    drawn = draw(rest, uniform)
    return drawn, torch.where(rest.gather(1, drawn) > 0, log_probs.gather(1, drawn), -math.inf)


def weights(found: Tensor, log_tail: Tensor) -> Tensor:
    """M / (m p) of m drawn ids with log-probabilities ``found`` (N, m); ``log_tail`` (N,) is log M."""
    return torch.where(found > -math.inf, (log_tail[:, None] - found).exp() / found.shape[1], 0.0)


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The same in two steps, a block of ids and then an id in it: only blocks that are drawn are summed id by id."""
    blocks = torch.nn.functional.pad(weights, (0, -weights.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    sums = blocks.sum(-1, dtype=torch.float64)
    running = sums.cumsum(-1)
    point = uniform.to(weights.device) * running[:, -1:]
    block = torch.searchsorted(running, point, right=True).clamp(max=blocks.shape[1] - 1)
    inside = blocks[torch.arange(len(blocks), device=block.device)[:, None], block].double().cumsum(-1)
    before = running.gather(1, block) - sums.gather(1, block)
    # Rounded sums may put the point a hair outside its block, onto an id without weight.
    end = torch.nextafter(inside[..., -1], torch.zeros_like(point))
    place = torch.searchsorted(inside, (point - before).clamp(min=0).minimum(end)[..., None], right=True)[..., 0]
    return torch.where(running[:, -1:] > 0, block * _BLOCK + place, 0)


_MASK = (1 << 64) - 1


def _signed(number: int) -> int:
    """The 64-bit two's complement of ``number``; products of int64 tensors wrap as SplitMix64 wants."""
    return number - (1 << 64) if number >> 63 else number


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(_FIRST)
    x = (x ^ _shift(x, 27)) * _signed(_SECOND)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
