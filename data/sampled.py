"""Codec sampled: m ids drawn from p, or from a tempered p, each with its exact p and weight.

With r ∝ p^(1/T) an id has weight 1 / (m r): Σ w f(p, q) is unbiased for every f, because p is stored and not counted. Its
variance is small where f is at most of the size of p (cross-entropy, min(p, q)) and large where it follows q.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from data import draws, packing, rounding
from data.targets import SparseTargets


@dataclass(frozen=True)
class Sampled:
    """``samples`` ids by position, drawn at ``temperature`` relative to p (1: from p itself); ``bits`` for each log p."""

    samples: int
    temperature: float = 1.0
    seed: int = 0
    bits: int = 16

    def encode(self, logits: Tensor, key: int) -> dict[str, Tensor]:
        """Tensors to store for the (N, V) logits of one row, whose random draws are named by ``key``."""
        log_probs = logits.float().log_softmax(-1)
        tempered = log_probs / self.temperature
        log_total = tempered.logsumexp(-1)
        chances = (tempered - log_total[:, None]).exp()
        ids = draws.draw(chances, draws.uniforms(self.seed, key, len(logits), self.samples))
        stored = {"log_probs": rounding.rounded(log_probs.gather(1, ids), self.bits)}
        if self.temperature != 1:
            stored["log_total"] = log_total
        return stored | packing.pack(ids, logits.shape[-1])

    def decode(self, stored: dict[str, Tensor], vocabulary: int) -> SparseTargets:
        """What the tensors of N positions say."""
        log_probs = rounding.restored(stored["log_probs"])
        log_total = stored["log_total"][:, None] if self.temperature != 1 else 0.0
        weights = (log_total - log_probs / self.temperature).exp() / self.samples
        tail = torch.full((len(log_probs),), -math.inf)
        return SparseTargets(packing.unpack(stored, vocabulary), log_probs, tail, weights)

    def bytes_per_position(self, vocabulary: int, width: int) -> int:
        """Bytes stored for one target position."""
        return (
            packing.bytes_of_ids(self.samples, vocabulary) + self.bits // 8 * self.samples + (4 if self.temperature != 1 else 0)
        )
