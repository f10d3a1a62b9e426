"""The course of the learning rates over training: a linear warm-up, then a cosine, or a plateau and a decay.

One number between 0 and 1 for each step multiplies all rates. It knows no optimizer.
"""

import math

from pipeline.choices import Schedule
from pipeline.config import Optimizer


def share_of_rate(step: int, steps: int, config: Optimizer) -> float:
    """The share of the learning rate at ``step``, counted from 0, of ``steps``; ``final_share`` from ``steps`` on.

    Warm-up rises to 1 at its last step. Then ``cosine`` falls all the way (Loshchilov & Hutter, 2017), and ``wsd`` stays
    at 1 until the last ``decay_share`` of the steps, where it falls in a straight line (Hu et al., MiniCPM, 2024).
    """
    warmup = max(1, round(config.warmup_share * steps))
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule is Schedule.cosine:
        above = (1 + math.cos(math.pi * _progress(step, warmup, steps))) / 2
    else:
        above = 1 - _progress(step, steps - round(config.decay_share * steps), steps)
    return config.final_share + (1 - config.final_share) * above


def _progress(step: int, first: int, last: int) -> float:
    """How far ``step`` is from ``first`` to ``last``, within 0 and 1."""
    return 1.0 if step >= last else max(0, step - first) / max(1, last - first)
