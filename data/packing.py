"""Token ids in as few bits as the vocabulary needs: 16 as they are, the others packed into bytes by position.

An id of a vocabulary above 65,536 is its low 16 bits and, in a second tensor, one to three high bits.
"""

import torch
from torch import Tensor

_POWERS = 2 ** torch.arange(8)


def high_bits(vocabulary: int) -> int:
    """Bits of an id beyond the 16 low ones."""
    return max(0, (vocabulary - 1).bit_length() - 16)


def bytes_of_ids(count: int, vocabulary: int) -> int:
    """Bytes that ``count`` ids of one position take."""
    return 2 * count + -(-count * high_bits(vocabulary) // 8)


def pack(ids: Tensor, vocabulary: int) -> dict[str, Tensor]:
    """``ids`` (N, k) as uint16 and, where needed, ``ids_high`` (N, bytes) as uint8."""
    high = high_bits(vocabulary)
    stored = {"ids": (ids & 0xFFFF).to(torch.uint16)}
    if high:
        bits = ((ids[:, :, None] >> (16 + torch.arange(high, device=ids.device))) & 1).flatten(1)
        bits = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8))
        stored["ids_high"] = (bits.unflatten(1, (-1, 8)) * _POWERS.to(ids.device)).sum(-1).to(torch.uint8)
    return stored


def unpack(stored: dict[str, Tensor], vocabulary: int) -> Tensor:
    """The ids (N, k) as int64."""
    ids, high = stored["ids"].long(), high_bits(vocabulary)
    if not high:
        return ids
    bits = (stored["ids_high"].long()[:, :, None] >> torch.arange(8)) & 1
    bits = bits.flatten(1)[:, : ids.shape[1] * high].unflatten(1, (-1, high))
    return ids + (bits << (16 + torch.arange(high))).sum(-1)
