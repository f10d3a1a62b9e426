"""How many tokens to draft: as many as the costs of the machine and the acceptance so far make worthwhile.

Each round takes the K with the highest expected tokens per unit of time, τ(K) / (K·c + v(K+1) + o), K = 0 included.
A choice of 0 learns nothing, so a single draft is tried again now and then, ever more rarely while it does not pay.
No round is drafted that could, if all its drafts were wrong, put the text further behind plain decoding than ``MAY_LOSE``
steps and a small share of the text. What the draft must read again after rounds without it is charged at its measured
cost. Its reading of the prompt is not, for without that there would be no draft at all.
"""

from collections.abc import Sequence
from statistics import fmean

from speculative.cost import Costs

DECAY = 0.98  # a round's weight after the next one: the last fifty or so count
PRIOR = 2.0  # rounds that the first guess of the acceptance is worth
FIRST_TRIAL, LAST_TRIAL = 16, 512  # rounds without drafts before a trial, at first and at most
MAY_LOSE, SHARE = 1.0, 0.02  # plain steps behind plain decoding at most: at the start, and for each token written


class AutoLength:
    """Chooses K each round of a row from that row's acceptance so far, by position.

    Given to one call after the other, it goes on learning: every row of a call starts from what is known, and afterwards
    it knows what they learnt, on average. So with a temperature above 0 the same seed gives another text in the next call,
    by the same law; a fresh one, or the ``Costs`` in its place, gives the same text again.
    """

    def __init__(self, costs: Costs, expected: float = 0.6) -> None:
        """``expected`` acceptance of one draft before anything is known."""
        self.costs = costs
        self.kept = [PRIOR * expected] * costs.longest
        self.tried = [PRIOR] * costs.longest
        self.idle, self.patience = 0.0, float(FIRST_TRIAL)  # rounds
        self.written, self.saved = 0.0, 0.0  # tokens of the row, and plain steps that writing them so far has saved
        self.unread = 0.0  # tokens of them that the draft has not read

    def for_rows(self, count: int) -> list["AutoLength"]:
        """One for each of ``count`` rows, which knows what this one knows: rows must not depend on their neighbours."""
        rows = [AutoLength(self.costs) for _ in range(count)]
        for row in rows:
            row.learn([self])
        return rows

    def learn(self, rows: Sequence["AutoLength"]) -> None:
        """Know what ``rows`` know, on average."""
        for name in ("idle", "patience", "written", "saved"):
            setattr(self, name, fmean(getattr(row, name) for row in rows))
        self.kept, self.tried = (
            [fmean(places) for places in zip(*(getattr(row, name) for row in rows), strict=True)] for name in ("kept", "tried")
        )

    def choose(self) -> int:
        best = self._best()
        if best > 0:
            self.idle = 0
            return self._affordable(best)
        self.idle += 1
        if self.idle <= self.patience:
            return 0
        self.idle, self.patience = 0, min(2 * self.patience, LAST_TRIAL)
        return self._affordable(1)

    def _best(self) -> int:
        tokens, reached = 1.0, 1.0
        best, rate = 0, 1.0
        acceptance = 1.0
        for drafts in range(1, self.costs.longest + 1):
            # A place that was hardly reached is judged by the one before it.
            known = self.tried[drafts - 1]
            acceptance = self.kept[drafts - 1] / known if known >= 1.0 else acceptance
            reached *= acceptance
            tokens += reached
            if tokens / self.costs.round(drafts) > rate:
                best, rate = drafts, tokens / self.costs.round(drafts)
        return best

    def _affordable(self, wanted: int) -> int:
        """As many drafts of those wanted as may all be wrong: such a round writes one token and costs the rest."""
        free = self.saved + MAY_LOSE + SHARE * self.written
        return next((drafts for drafts in range(wanted, 0, -1) if self._cost(drafts) - 1 <= free), 0)

    def _cost(self, drafts: int) -> float:
        """Of the next round, in plain steps."""
        return self.costs.round(drafts) + self.costs.draft_reading * self.unread if drafts else 1.0

    def observe(self, asked: int, proposed: int, accepted: int) -> None:
        """What a round of the row brought: drafts ``asked`` for, which were paid, ``proposed`` and ``accepted``.

        Fewer are proposed than asked for where a draft was unsure or lookup found nothing.
        """
        accepted = min(accepted, proposed)
        self.written += 1 + accepted
        self.saved += 1 + accepted - self._cost(asked)
        self.unread = 0.0 if asked else self.unread + 1
        for place in range(proposed):
            if place <= accepted:
                self.tried[place] = DECAY * self.tried[place] + 1
                self.kept[place] = DECAY * self.kept[place] + (place < accepted)
        if proposed and self._best() > 0:
            self.patience = FIRST_TRIAL
