"""Intervals over prompts and drafts by bootstrap. Tokens of one text depend on each other, so whole prompts are drawn."""

from collections.abc import Sequence

import numpy as np

# Of n values even [least, greatest] misses the median with probability 2 · 2^−n: below six that is more than 5 %.
FEWEST = 6


def median_interval(
    values: Sequence[float], seed: int, level: float = 0.95, resamples: int = 2000
) -> tuple[float, float, float]:
    """The median and a percentile bootstrap interval (Efron, 1979) of it: (median, low, high)."""
    data = np.asarray(values, dtype=float)
    low, high = np.quantile(np.median(_resampled(data, seed, resamples), axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(np.median(data)), float(low), float(high)


def mean_interval(values: Sequence[float], seed: int, level: float = 0.95, resamples: int = 2000) -> tuple[float, float, float]:
    """The same of the mean: (mean, low, high)."""
    data = np.asarray(values, dtype=float)
    low, high = np.quantile(_resampled(data, seed, resamples).mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(data.mean()), float(low), float(high)


def _resampled(data: np.ndarray, seed: int, resamples: int) -> np.ndarray:
    """``data`` (N,) drawn again with replacement, (resamples, N)."""
    return data[np.random.default_rng(seed).integers(len(data), size=(resamples, len(data)))]


def correlation_interval(
    x: Sequence[float], y: Sequence[float], ranks: bool, seed: int, level: float = 0.95, resamples: int = 2000
) -> tuple[float, float, float]:
    """Spearman's (``ranks``) or Pearson's correlation with a bootstrap interval over the pairs: (value, low, high).

    NaN where it is not defined: fewer than three pairs, or one side constant. Resamples without a correlation are left out.
    """
    pairs = np.asarray([x, y], dtype=float)
    count = pairs.shape[1]
    if count < 3:
        return (float("nan"),) * 3
    picks = np.random.default_rng(seed).integers(count, size=(resamples, count))
    value = _correlations(pairs[:, None, :], ranks)[0]
    drawn = _correlations(pairs[:, picks], ranks)
    drawn = drawn[np.isfinite(drawn)]
    if not np.isfinite(value):
        return (float("nan"),) * 3
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(value), float(low), float(high)


def _correlations(pairs: np.ndarray, ranks: bool) -> np.ndarray:
    """Correlations (R,) of pairs (2, R, N)."""
    values = average_ranks(pairs) if ranks else pairs
    centred = values - values.mean(-1, keepdims=True)
    scale = np.sqrt((centred**2).sum(-1))
    constant = np.ptp(values, axis=-1) == 0
    with np.errstate(invalid="ignore", divide="ignore"):
        found = (centred[0] * centred[1]).sum(-1) / (scale[0] * scale[1])
    return np.where(constant.any(0), np.nan, found)


def average_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks along the last axis from 1; equal values share the mean of their ranks."""
    smaller = (values[..., None, :] < values[..., :, None]).sum(-1)
    equal = (values[..., None, :] == values[..., :, None]).sum(-1)
    return smaller + (equal + 1) / 2


def explained(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """R² of the prediction as it stands, no line fitted: 1 − Σ(m − p)² / Σ(m − mean)²; NaN if all measured are equal."""
    p, m = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
    spread = ((m - m.mean()) ** 2).sum()
    return float(1 - ((m - p) ** 2).sum() / spread) if spread > 0 else float("nan")
