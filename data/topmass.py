"""Codec topk whose k varies by position: as few of the best ids as reach a share of the mass, then ids drawn from the tail.

Where the target is sure, one id is enough; where it is not, k ids are kept at most. Positions take unequal room, so the ids
of a row lie one after the other and ``counts`` says how many are whose. What ids and weights mean is as in codec topk.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from data import draws, packing, rounding
from data.targets import SparseTargets


@dataclass(frozen=True)
class TopMass:
    """At a position the least number of best ids whose mass is at least ``mass``, ``top_k`` at most; the rest as TopK."""

    top_k: int
    mass: float
    tail_samples: int = 0
    seed: int = 0
    bits: int = 16

    def encode(self, logits: Tensor, key: int) -> dict[str, Tensor]:
        """Tensors to store for the (N, V) logits of one row; those named ``flat_…`` are not by position."""
        vocabulary = logits.shape[-1]
        every = logits.float().log_softmax(-1)
        log_probs, ids = every.topk(min(self.top_k, vocabulary), dim=-1)
        reached = log_probs.double().exp().cumsum(-1)
        counts = (1 + (reached < self.mass).sum(-1)).clamp(max=ids.shape[1])
        kept = torch.arange(ids.shape[1], device=ids.device) < counts[:, None]
        mass = reached.gather(1, counts[:, None] - 1)[:, 0]
        stored = {
            "counts": counts.to(torch.int32),
            "log_tail": (1 - mass).clamp(min=1e-12).log().float(),
            "entropy": -torch.where(every > -math.inf, every.exp() * every, 0.0).sum(-1),
        }
        if self.tail_samples:
            rest = every.exp().scatter(1, ids, torch.where(kept, 0.0, log_probs.exp()))
            drawn, found = draws.from_tail(rest, every, draws.uniforms(self.seed, key, len(logits), self.tail_samples))
            ids, log_probs = torch.cat([ids, drawn], 1), torch.cat([log_probs, found], 1)
            kept = torch.cat([kept, torch.ones_like(drawn, dtype=torch.bool)], 1)
        packed = packing.pack(ids[kept][None], vocabulary)
        flat = {f"flat_{name}": tensor[0] for name, tensor in packed.items()}
        return stored | flat | {"flat_log_probs": rounding.rounded(log_probs[kept], self.bits)}

    def decode(self, stored: dict[str, Tensor], vocabulary: int) -> SparseTargets:
        """What the tensors of one row say. A place that a position does not need repeats its best id, with no mass."""
        packed = {name: stored[f"flat_{name}"][None] for name in ("ids", "ids_high") if f"flat_{name}" in stored}
        flat_ids, flat = packing.unpack(packed, vocabulary)[0], rounding.restored(stored["flat_log_probs"])
        counts, log_tail, drawn = stored["counts"].long()[:, None], stored["log_tail"], self.tail_samples
        first = (counts + drawn).cumsum(0) - (counts + drawn)
        column = torch.arange(int(counts.max()))
        needed = column < counts
        place = torch.where(needed, first + column, first)
        ids, log_probs = flat_ids[place], torch.where(needed, flat[place], -math.inf)
        if not drawn:
            return SparseTargets(ids, log_probs, log_tail, certain=ids.shape[1])
        place = first + counts + torch.arange(drawn)
        found = flat[place]
        return SparseTargets(
            torch.cat([ids, flat_ids[place]], 1),
            torch.cat([log_probs, found], 1),
            torch.full_like(log_tail, -math.inf),
            torch.cat([torch.ones_like(log_probs), draws.weights(found, log_tail)], 1),
            ids.shape[1],
        )

    def flat_lengths(self, counts: Tensor, vocabulary: int) -> dict[str, int]:
        """Lengths of the tensors ``flat_…`` of a row with these ``counts`` (N,)."""
        total = int(counts.sum()) + len(counts) * self.tail_samples
        high = packing.bytes_of_ids(total, vocabulary) - 2 * total
        return {"flat_ids": total, "flat_ids_high": high, "flat_log_probs": total}

    def bytes_per_position(self, vocabulary: int, width: int) -> int:
        """The most bytes that one target position can take."""
        count = min(self.top_k, vocabulary) + self.tail_samples
        return packing.bytes_of_ids(count, vocabulary) + self.bits // 8 * count + 4 + 4 + 4
