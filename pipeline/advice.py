"""The maths of advice: what a calibration says of other sizes and batches, and what a learning curve says of a draft.

Times come in as measured, verdicts go out; nothing here runs a model or knows where numbers were kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from speculative.cost import Costs
from speculative.waterfall import expected_tokens

Times = Mapping[int, float]  # tokens in one forward → seconds
EPOCHS = 4.0  # seeing text again is worth almost as much as new text up to here (Muennighoff et al., 2305.16264)
WORTH = 0.01  # overlap that doubling the tokens must gain to be called a gain
NOISE = 0.005  # overlap that a validation may fall by and mean nothing
FEWEST = 4  # points that a curve of three parameters needs


def batched(costs: Costs, target: Times, draft: Times, batch: int) -> Costs:
    """The costs of decoding ``batch`` rows together, in plain steps of that batch, from those of one row.

    A forward grows as ``target`` and ``draft`` say: one over B rows of n positions costs what B·n tokens cost. What a round
    costs besides forwards is taken to be the same.

    Raises:
        ValueError: more tokens than were timed.
    """
    plain = costs.verify[0] * _growth(target, 1, batch) + costs.other[0]
    return replace(
        costs,
        plain_seconds=costs.plain_seconds * plain,
        draft=costs.draft * _growth(draft, 1, batch) / plain,
        verify=tuple(value * _growth(target, n, batch) / plain for n, value in enumerate(costs.verify, start=1)),
        other=tuple(value / plain for value in costs.other),
        reading=costs.reading * batch / plain,
        draft_reading=costs.draft_reading * batch / plain,
    )


def _growth(times: Times, tokens: int, batch: int) -> float:
    """How much longer a forward over ``batch`` times as many tokens takes; between two that were timed, a straight line."""
    known = sorted(times)
    if tokens * batch > known[-1]:
        raise ValueError(f"{tokens * batch} tokens: the longest forward that was timed has {known[-1]}")
    small, large = np.interp([tokens, tokens * batch], known, [times[count] for count in known])
    return float(large / small)


def resized(costs: Costs, read: float, calibrated: float, target: float) -> Costs:
    """The costs of a draft that reads ``read`` parameters a step, where one that reads ``calibrated`` was timed.

    A step's cost is a straight line in what is read, through the timed draft and the ``target`` itself; below the timed
    draft it falls no faster than what is read.
    """
    slope = (costs.verify[0] - costs.draft) / (target - calibrated)
    line = costs.draft + slope * (read - calibrated)
    draft = max(line, costs.draft * min(read / calibrated, 1.0)) if read < calibrated else line
    return replace(costs, draft=draft, draft_reading=costs.draft_reading * read / calibrated)


def best_at(costs: Costs, overlap: float) -> tuple[int, float]:
    """The K with the highest ratio if every draft is accepted with probability ``overlap``, and that ratio; (0, 1) is plain."""
    ratios = {0: 1.0} | {k: expected_tokens(overlap, k) / costs.round(k) for k in range(1, costs.longest + 1)}
    best = max(ratios, key=ratios.__getitem__)
    return best, ratios[best]


def needed_overlap(costs: Costs, ratio: float) -> float | None:
    """The least overlap at which some K ≥ 1 reaches ``ratio``, to 1e-4; None if none does."""

    def reaches(overlap: float) -> bool:
        return any(expected_tokens(overlap, k) >= ratio * costs.round(k) for k in range(1, costs.longest + 1))

    if not reaches(1.0):
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class Learning:
    """overlap(t) = ceiling − scale · t^−exponent, t being tokens trained on."""

    ceiling: float
    scale: float
    exponent: float

    def at(self, tokens: float) -> float:
        return self.ceiling - self.scale * tokens**-self.exponent


def fit(points: Sequence[tuple[float, float]]) -> Learning:
    """The curve of least squares through (tokens, overlap), its ceiling at most 1.

    Raises:
        ValueError: fewer points than such a curve needs.
    """
    if len(points) < FEWEST:
        raise ValueError(f"{len(points)} validations tell no curve, {FEWEST} may")
    tokens, overlaps = np.asarray(points, dtype=float).T
    start = tokens[0]  # powers of large numbers would be lost in rounding
    candidates = [_with_exponent(tokens / start, overlaps, float(power)) for power in np.arange(0.05, 3.0, 0.01)]
    _, ceiling, scale, power = min(candidates)
    return Learning(ceiling, scale * float(start) ** power, power)


def _with_exponent(tokens: np.ndarray, overlaps: np.ndarray, power: float) -> tuple[float, float, float, float]:
    """(squared error, ceiling, scale ≥ 0, power) of the best curve with this exponent."""
    falls = -(tokens**-power)
    (ceiling, scale), *_ = np.linalg.lstsq(np.stack([np.ones_like(falls), falls], 1), overlaps, rcond=None)
    if ceiling > 1:
        ceiling, scale = 1.0, float(falls @ (overlaps - 1) / (falls @ falls))
    if scale < 0:  # it does not rise
        ceiling, scale = overlaps.mean(), 0.0
    error = ((ceiling + scale * falls - overlaps) ** 2).sum()
    return float(error), float(ceiling), float(scale), power


@dataclass(frozen=True)
class Lack:
    """What a draft lacks: ``steps``, ``data`` or ``capacity``; ``gain``: overlap that twice the tokens would add."""

    what: str
    gain: float
    ceiling: float


def lacking(points: Sequence[tuple[float, float]], epochs: float) -> Lack:
    """What would help a draft with these validations (tokens, overlap), after ``epochs`` passes over its text.

    Data, if overlap fell after its best validation, or if twice the tokens would help but be a fifth pass over the same
    text; steps, if twice the tokens would help; capacity, if they would not.

    Raises:
        ValueError: too few validations.
    """
    learnt = fit(points)
    tokens, last = points[-1]
    gain = learnt.at(2 * tokens) - learnt.at(tokens)
    if last < max(overlap for _, overlap in points) - NOISE:
        return Lack("data", gain, learnt.ceiling)
    if gain < WORTH:
        return Lack("capacity", gain, learnt.ceiling)
    return Lack("steps" if 2 * epochs <= EPOCHS else "data", gain, learnt.ceiling)
