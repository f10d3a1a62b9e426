"""Intervals over prompts: tokens of one text depend on each other, so whole prompts are resampled."""

from collections.abc import Sequence

import numpy as np


def median_interval(
    values: Sequence[float], seed: int, level: float = 0.95, resamples: int = 2000
) -> tuple[float, float, float]:
    """The median and a percentile bootstrap interval (Efron, 1979) of it: (median, low, high)."""
    data = np.asarray(values, dtype=float)
    picks = np.random.default_rng(seed).integers(len(data), size=(resamples, len(data)))
    medians = np.median(data[picks], axis=1)
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    return float(np.median(data)), float(low), float(high)
