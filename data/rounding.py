"""Log-probabilities in 16 or 8 bits.

16 bits are half precision. 8 bits hold the square root of −log p, so that steps are finest where p is large: p is off by
at most 0.5 % at 0.95, 1.2 % at 0.3 and 7 % at e⁻¹², in both directions alike. −∞ has a code of its own.
"""

import math

import torch
from torch import Tensor

SMALLEST = -25.0  # log-probability of the last finite code; what is smaller is stored as this
_LAST = 254  # code of SMALLEST; 255 is −∞


def rounded(log_probs: Tensor, bits: int) -> Tensor:
    """``log_probs`` ≤ 0 as float16 or uint8 codes, in the same shape."""
    if bits == 16:
        return log_probs.half()
    codes = ((log_probs.clamp(min=SMALLEST, max=0) / SMALLEST).sqrt() * _LAST).round()
    return torch.where(log_probs == -math.inf, 255, codes).to(torch.uint8)


def restored(stored: Tensor) -> Tensor:
    """The float32 log-probabilities that ``rounded`` stored."""
    if stored.dtype is not torch.uint8:
        return stored.float()
    codes = stored.float()
    return torch.where(codes > _LAST, -math.inf, (codes / _LAST) ** 2 * SMALLEST)
