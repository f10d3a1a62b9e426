"""The target's next-token distributions on disk: the k best tokens exactly, and the mass of all the others.

One safetensors shard per batch of rows, with the token ids beside their targets. Position j of a row's targets is the
distribution of response token j. Dropping the tail mass would cap the acceptance that a draft can learn, so it is kept.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.artifact import atomic


@dataclass(frozen=True)
class SparseTargets:
    """Distributions at N positions: ``ids`` (N, k), their ``log_probs`` (N, k), and the log of the mass outside, (N,)."""

    ids: Tensor
    log_probs: Tensor
    log_tail: Tensor


@dataclass(frozen=True)
class Row:
    """One prompt and response: ``tokens`` (T,), the response starts at ``start``; ``targets`` of its T − start tokens."""

    tokens: Tensor
    start: int
    targets: SparseTargets


def compress(logits: Tensor, k: int) -> dict[str, Tensor]:
    """Tensors to store for (N, V) logits: top-k ids and log-probabilities, log-normaliser, log tail mass."""
    logits = logits.float()
    log_normalizer = logits.logsumexp(-1)
    values, ids = logits.topk(min(k, logits.shape[-1]), dim=-1)
    log_probs = values - log_normalizer[:, None]
    mass = log_probs.double().exp().sum(-1)
    small = torch.uint16 if logits.shape[-1] <= 1 << 16 else torch.int32
    return {
        "ids": ids.to(small),
        "log_probs": log_probs.half(),
        "log_normalizer": log_normalizer,
        "log_tail": (1 - mass).clamp(min=1e-12).log().float(),
    }


def bytes_per_position(k: int, vocabulary: int) -> int:
    """Bytes stored for one target position, its token id included."""
    return min(k, vocabulary) * ((2 if vocabulary <= 1 << 16 else 4) + 2) + 4 + 4 + 4


def write_shard(path: Path, rows: list[tuple[list[int], int]], targets: dict[str, Tensor]) -> None:
    """Write rows of (tokens, response start) with their concatenated ``targets`` atomically."""
    tensors = {
        "tokens": torch.tensor([token for tokens, _ in rows for token in tokens], dtype=torch.int32),
        "lengths": torch.tensor([len(tokens) for tokens, _ in rows], dtype=torch.int32),
        "starts": torch.tensor([start for _, start in rows], dtype=torch.int32),
        **{name: tensor.contiguous() for name, tensor in targets.items()},
    }
    if len(targets["ids"]) != sum(len(tokens) - start for tokens, start in rows):
        raise ValueError("a shard needs one target for each response token")
    with atomic(path) as temporary:
        save_file(tensors, temporary)


class LogitCache:
    """Rows of a folder of shards, memory-mapped: nothing but an index of lengths stays in memory."""

    def __init__(self, folder: Path) -> None:
        self._shards = [safe_open(path, framework="pt") for path in sorted(folder.glob("shard-*.safetensors"))]
        self.lengths: list[int] = []
        self.starts: list[int] = []
        self._places: list[tuple[int, int, int]] = []  # shard, first token, first target
        for number, shard in enumerate(self._shards):
            token = target = 0
            for length, start in zip(shard.get_tensor("lengths").tolist(), shard.get_tensor("starts").tolist(), strict=True):
                self.lengths.append(length)
                self.starts.append(start)
                self._places.append((number, token, target))
                token, target = token + length, target + length - start

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def positions(self) -> int:
        """Number of target positions."""
        return sum(self.lengths) - sum(self.starts)

    def __getitem__(self, index: int) -> Row:
        number, token, target = self._places[index]
        length, start = self.lengths[index], self.starts[index]
        shard = self._shards[number]

        def read(name: str, first: int, count: int) -> Tensor:
            return shard.get_slice(name)[first : first + count]

        return Row(
            read("tokens", token, length).long(),
            start,
            SparseTargets(
                read("ids", target, length - start).long(),
                read("log_probs", target, length - start).float(),
                read("log_tail", target, length - start),
            ),
        )
