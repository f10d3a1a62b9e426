"""Codec dense: every log-probability in float32, the reference for tests and small studies."""

from dataclasses import dataclass

from torch import Tensor

from data.targets import DenseTargets


@dataclass(frozen=True)
class Dense:
    def encode(self, logits: Tensor, key: int) -> dict[str, Tensor]:
        """Tensors to store for the (N, V) logits of one row."""
        return {"log_probs": logits.float().log_softmax(-1)}

    def decode(self, stored: dict[str, Tensor], vocabulary: int) -> DenseTargets:
        """What the tensors of N positions say."""
        return DenseTargets(stored["log_probs"])

    def bytes_per_position(self, vocabulary: int, width: int) -> int:
        """Bytes stored for one target position."""
        return 4 * vocabulary
