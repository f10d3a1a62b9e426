"""Codec topk: the k best ids exactly, the mass and entropy of the rest, and m ids drawn from the tail with their exact p.

A drawn id has weight M / (m p), M the tail mass: Σ f over the k exact ids plus the weighted ids is unbiased for every f.
Without drawn ids the tail is one outcome of known mass; dropping it would cap the acceptance that a draft can learn.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from data import draws, packing, rounding
from data.targets import SparseTargets

BLOCK = 64  # ids searched together
TOGETHER = 32  # positions whose distributions are in the processor's cache at once


def largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest values (N, k) of each row and their ids (N, k), the largest first.

    They lie in the k blocks with the largest maxima, so a large vocabulary is searched for blocks and these for ids.
    """
    blocks, rest = divmod(logits.shape[1], BLOCK)
    if rest or k > blocks // 4:
        return logits.topk(k, dim=-1)
    tall = logits.unflatten(1, (blocks, BLOCK))
    chosen = tall.amax(-1).topk(k, dim=-1).indices
    values, places = tall.gather(1, chosen[:, :, None].expand(-1, -1, BLOCK)).flatten(1).topk(k, dim=-1)
    return values, chosen.gather(1, places // BLOCK) * BLOCK + places % BLOCK


@dataclass(frozen=True)
class TopK:
    """``top_k`` exact ids and ``tail_samples`` drawn ones by position, log-probabilities in ``bits`` (16 or 8)."""

    top_k: int
    tail_samples: int = 0
    seed: int = 0
    bits: int = 16

    def encode(self, logits: Tensor, key: int) -> dict[str, Tensor]:
        """Tensors to store for the (N, V) logits of one row, whose random draws are named by ``key``."""
        vocabulary, uniforms = logits.shape[-1], draws.uniforms(self.seed, key, len(logits), self._drawn(logits.shape[-1]))
        parts = [self._encode(*part) for part in zip(logits.split(TOGETHER), uniforms.split(TOGETHER), strict=True)]
        ids, log_probs, log_tail, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
        stored = {"log_tail": log_tail, "entropy": entropy}
        return stored | packing.pack(ids, vocabulary) | {"log_probs": rounding.rounded(log_probs, self.bits)}

    def _encode(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ids and log-probabilities (N, k + m), the log of the mass beyond the best, and the entropy, (N,) each."""
        values, ids = largest(logits, min(self.top_k, logits.shape[-1]))
        # e^-1000 is 0 as e^-inf is, and 0 times it no NaN.
        shifted = (logits.float() - values[:, :1].float()).clamp_(min=-1000)
        weights = shifted.exp()
        log_total = weights.sum(-1).log()
        entropy = log_total - torch.linalg.vecdot(weights, shifted) / log_total.exp()
        log_probs = values.float() - values[:, :1].float() - log_total[:, None]
        log_tail = (1 - log_probs.double().exp().sum(-1)).clamp(min=1e-12).log().float()
        if uniforms.shape[1]:
            drawn, found = draws.from_tail(weights.scatter_(1, ids, 0.0), shifted, uniforms)
            ids, log_probs = torch.cat([ids, drawn], 1), torch.cat([log_probs, found - log_total[:, None]], 1)
        return ids, log_probs, log_tail, entropy

    def decode(self, stored: dict[str, Tensor], vocabulary: int) -> SparseTargets:
        """What the tensors of N positions say."""
        ids, log_probs = packing.unpack(stored, vocabulary), rounding.restored(stored["log_probs"])
        log_tail = stored["log_tail"]
        drawn = self._drawn(vocabulary)
        if not drawn:
            return SparseTargets(ids, log_probs, log_tail, certain=ids.shape[1])
        weights = torch.ones_like(log_probs)
        weights[:, -drawn:] = draws.weights(log_probs[:, -drawn:], log_tail)
        return SparseTargets(ids, log_probs, torch.full_like(log_tail, -math.inf), weights, ids.shape[1] - drawn)

    def bytes_per_position(self, vocabulary: int, width: int) -> int:
        """Bytes stored for one target position."""
        count = min(self.top_k, vocabulary) + self._drawn(vocabulary)
        return packing.bytes_of_ids(count, vocabulary) + self.bits // 8 * count + 4 + 4

    def _drawn(self, vocabulary: int) -> int:
        return self.tail_samples if self.top_k < vocabulary else 0
