"""From agreement on a text to measured time, in four steps, so that one sees which step lost the gain.

    level     tokens a round                          what changes towards the next level
    text      i.i.d. at the teacher-forced overlap    text → prefixes that decoding itself has written
    prefixes  i.i.d. at P(draft 1 accepted)           position 1 → position j
    positions i.i.d. at P(a tried draft accepted)     independence → product of what happened
    product   tokens a round as counted               operations → wall clock of the whole call, prompt and all
    time      –                                       (the measured ratio)

The first four levels divide tokens a round by the calibrated cost of a round. The factors between neighbouring levels
multiply to measured ÷ first level. Nothing here runs a model.
"""

from dataclasses import astuple, dataclass

from speculative.cost import Costs
from speculative.metrics import Acceptance

STEPS = ("prefixes", "positions", "independence", "operations")


@dataclass(frozen=True)
class Waterfall:
    """Speed ratios, one for each level."""

    text: float
    prefixes: float
    positions: float
    product: float
    time: float

    @property
    def levels(self) -> tuple[float, ...]:
        return astuple(self)

    @property
    def factors(self) -> dict[str, float]:
        """What each of ``STEPS`` multiplies the ratio by; below 1 it costs speed."""
        levels = self.levels
        return {name: after / before for name, before, after in zip(STEPS, levels, levels[1:], strict=False)}

    @property
    def weakest(self) -> str:
        """The step that lost the most."""
        return min(self.factors, key=self.factors.__getitem__)


def waterfall(overlap: float, counts: Acceptance, costs: Costs, drafts: int, measured: float) -> Waterfall:
    """The levels for K = ``drafts``.

    Args:
        overlap: mean acceptance probability, teacher-forced.
        counts: what was accepted in the decoding that ``measured`` timed; at least one draft was tried.
        measured: plain time ÷ speculative time.
    """
    cost = costs.round(drafts)
    first, *_ = counts.by_position
    return Waterfall(
        text=expected_tokens(overlap, drafts) / cost,
        prefixes=expected_tokens(first, drafts) / cost,
        positions=expected_tokens(counts.accepted / tried(counts), drafts) / cost,
        product=counts.tokens_per_round / cost,
        time=measured,
    )


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Tokens a round when each draft is accepted with the same probability: 1 + a + … + a^K (Leviathan et al., 2211.17192)."""
    return sum(acceptance**k for k in range(drafts + 1))


def tried(counts: Acceptance) -> int:
    """Drafts that were judged: those up to the first rejection of their round, that one included."""
    return sum(
        count * min(accepted + 1, proposed) for proposed, row in enumerate(counts.rounds) for accepted, count in enumerate(row)
    )
