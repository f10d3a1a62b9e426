"""The cost model: from agreement and measured costs to the speed that decoding will reach.

    ratio(K) = (P·r + N) / (P·(r + s) + N / τ̂(K) · (K·c + h + v(K+1) + o))

Times are in units of one plain decoding step: c one draft step, h all heads at once (0 for a draft model), v(n) a target
forward over n new positions, o all the rest of a round. N tokens follow a prompt of P, each of which costs r to read, and s
more if a draft reads it too. Nothing here runs a model (Leviathan et al., 2211.17192, with v measured and not assumed to be
1, and with the prompt).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Deeper = Sequence[Sequence[float]]  # chances of draft 2, 3, … by position, where they are not those of the first


@dataclass(frozen=True)
class Costs:
    """Costs relative to one plain step of ``plain_seconds``; ``verify[n-1]`` = v(n), ``other[K]`` = o at K drafts.

    v(1) + other[0] = 1: the plain step is a round without drafts. ``draft`` is paid for every draft, ``heads`` once a
    round that has drafts. ``reading`` and ``draft_reading`` are r and s, of prompts as long as those that were timed.
    """

    plain_seconds: float
    draft: float
    verify: tuple[float, ...]
    other: tuple[float, ...]
    heads: float = 0.0
    reading: float = 0.0
    draft_reading: float = 0.0

    @classmethod
    def stored(cls, fields: dict[str, Any]) -> "Costs":
        """The costs that ``dataclasses.asdict`` took apart, and JSON may have kept."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})

    @property
    def longest(self) -> int:
        """The largest K that was measured."""
        return len(self.verify) - 1

    def drafting(self, drafts: int) -> float:
        """Cost of K = ``drafts`` drafts, in plain steps."""
        return drafts * self.draft + (self.heads if drafts else 0.0)

    def round(self, drafts: int) -> float:
        """Cost of a round with K = ``drafts``, in plain steps."""
        return self.drafting(drafts) + self.verify[drafts] + self.other[drafts]


def rounds_needed(acceptance: Sequence[float], drafts: int, deeper: Deeper = ()) -> float:
    """Expected rounds to write a text when the draft of position t is accepted with probability ``acceptance[t]``.

    ``deeper[d]`` is the same for the drafts that stand d + 2-nd in their round; without it place in the round makes no
    difference.

    Rounds start where the one before ended, so hard stretches hold more rounds than their share of tokens; averaging
    over all positions alike would miss that. Solved from the end: R(t) = 1 + Σ_m P(m accepted from t) · R(t + m + 1),
    exact when acceptances are independent given the text.
    """
    length, levels = len(acceptance), [acceptance, *deeper]
    remaining = [0.0] * (length + drafts + 2)
    for start in range(length - 1, -1, -1):
        expected, alive = 1.0, 1.0
        limit = min(drafts, length - start - 1)  # never more than the tokens still wanted
        for m in range(limit):
            chance = levels[min(m, len(levels) - 1)][start + m]
            expected += alive * (1 - chance) * remaining[start + m + 1]
            alive *= chance
        remaining[start] = expected + alive * remaining[start + limit + 1]
    return remaining[0]


def expected_ratio(acceptance: Sequence[float], costs: Costs, drafts: int, deeper: Deeper = (), prompt: int = 0) -> float:
    """Predicted plain time ÷ speculative time for one text, given its acceptance probability by position.

    ``prompt``: tokens before it, which both must read; without them the ratio is that of decoding alone.
    """
    read = prompt * costs.reading
    read_too = read + (prompt * costs.draft_reading if drafts else 0.0)
    return (read + len(acceptance)) / (read_too + rounds_needed(acceptance, drafts, deeper) * costs.round(drafts))


def best_length(texts: Sequence[Sequence[float]], costs: Costs, deeper: Sequence[Deeper] | None = None) -> tuple[int, float]:
    """The K with the highest predicted ratio over all texts, and that ratio; K = 0 (ratio 1) is always a candidate.

    ``deeper`` is by text.
    """
    tokens = sum(map(len, texts))
    below = deeper or [()] * len(texts)
    ratios = {0: 1.0}
    for drafts in range(1, costs.longest + 1):
        rounds = sum(rounds_needed(text, drafts, more) for text, more in zip(texts, below, strict=True))
        ratios[drafts] = tokens / (rounds * costs.round(drafts))
    best = max(ratios, key=ratios.__getitem__)
    return best, ratios[best]


def break_even_overlap(costs: Costs) -> float:
    """The acceptance probability, equal at all positions, below which no K is faster than plain; 1.0 if none is."""

    def wins(overlap: float) -> bool:
        lengths = range(1, costs.longest + 1)
        return any(sum(overlap**j for j in range(k + 1)) > costs.round(k) for k in lengths)

    if not wins(1.0):
        return 1.0
    low, high = 0.0, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high
