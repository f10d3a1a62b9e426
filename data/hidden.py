"""Codec hidden: the state that the target's head reads, in 16 or 8 bits, and one copy of that head for the whole cache.

Log-probabilities of the whole vocabulary are recomputed when they are read. 8 bits: each block of 9 numbers has a scale of its
own, a power of 2^⅛ in another 8 bits, so that one outlying dimension coarsens few others: a final hidden state has some that
are 30 times the rest.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from data.targets import DenseTargets

HEAD = "head.safetensors"
BLOCK = 9
_STEPS = 8  # scales in an octave
_LEAST = -182  # the least of 256 scales, in steps; the largest is that of a block with the largest number of half precision
_POSITIONS = 256  # whose log-probabilities are computed at once


@dataclass(frozen=True)
class Hidden:
    """``bits`` (8 or 16) for each number of the hidden state."""

    bits: int = 16

    def encode(self, hidden: Tensor, key: int) -> dict[str, Tensor]:
        """Tensors to store for the (N, d) states of one row, taken after the final norm."""
        hidden = hidden.float()
        if not bool((hidden.abs() <= torch.finfo(torch.float16).max).all()):
            raise ValueError("a hidden state does not fit into half precision")
        if self.bits == 16:
            return {"hidden": hidden.half()}
        blocks = torch.nn.functional.pad(hidden, (0, -hidden.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
        scales = (_STEPS * (blocks.abs().amax(-1) / 127).log2()).ceil().clamp(_LEAST, _LEAST + 255) - _LEAST
        codes = (blocks / _scale(scales)[:, :, None]).round().clamp(-127, 127)
        return {"hidden": codes.flatten(1)[:, : hidden.shape[1]].to(torch.int8), "scales": scales.to(torch.uint8)}

    def decode_hidden(self, stored: dict[str, Tensor]) -> Tensor:
        """The states (N, d) in float32."""
        hidden = stored["hidden"].float()
        if self.bits == 16:
            return hidden
        return hidden * _scale(stored["scales"].float()).repeat_interleave(BLOCK, 1)[:, : hidden.shape[1]]

    def bytes_per_position(self, vocabulary: int, width: int) -> int:
        """Bytes stored for one target position of a state of ``width`` numbers; the head comes on top, once."""
        return 2 * width if self.bits == 16 else width + -(-width // BLOCK)


def _scale(stored: Tensor) -> Tensor:
    """The scales of blocks as numbers."""
    return torch.exp2((stored + _LEAST) / _STEPS)


def through_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> DenseTargets:
    """Log-probabilities (N, V) of states (N, d) under a head (V, d), computed in chunks of positions in float32."""
    log_probs = torch.empty(len(hidden), len(weight))
    for states, out in zip(hidden.split(_POSITIONS), log_probs.split(_POSITIONS), strict=True):
        out.copy_(torch.nn.functional.linear(states, weight, bias).log_softmax(-1))
    return DenseTargets(log_probs)
