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


@dataclass(frozen=True)
class TopK:
    """``top_k`` exact ids and ``tail_samples`` drawn ones by position, log-probabilities in ``bits`` (16 or 8)."""

    top_k: int
    tail_samples: int = 0
    seed: int = 0
    bits: int = 16

    def encode(self, logits: Tensor, key: int) -> dict[str, Tensor]:
        """Tensors to store for the (N, V) logits of one row, whose random draws are named by ``key``."""
        vocabulary = logits.shape[-1]
        logits = logits.float()
        log_normalizer = logits.logsumexp(-1)
        values, ids = logits.topk(min(self.top_k, vocabulary), dim=-1)
        log_probs = values - log_normalizer[:, None]
        mass = log_probs.double().exp().sum(-1)
        every = logits - log_normalizer[:, None]
        stored = {
            "log_tail": (1 - mass).clamp(min=1e-12).log().float(),
            "entropy": -torch.where(every > -math.inf, every.exp() * every, 0.0).sum(-1),
        }
        if self._drawn(vocabulary):
            uniforms = draws.uniforms(self.seed, key, len(logits), self.tail_samples)
            drawn, found = draws.from_tail(every.exp().scatter(1, ids, 0.0), every, uniforms)
            ids, log_probs = torch.cat([ids, drawn], 1), torch.cat([log_probs, found], 1)
        return stored | packing.pack(ids, vocabulary) | {"log_probs": rounding.rounded(log_probs, self.bits)}

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
