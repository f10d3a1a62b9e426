"""How many tokens to draft: as many as the costs of the machine and the acceptance so far make worthwhile.

Each round takes the K with the highest expected tokens per unit of time, τ(K) / (K·c + v(K+1) + o), K = 0 included.
A choice of 0 learns nothing, so a single draft is tried again now and then, ever more rarely while it does not pay.
No round is drafted that could, if all its drafts were wrong, put the text further behind plain decoding than ``MAY_LOSE``
steps and a small share of the text: by these costs, no draft can do more harm.
"""

import torch
from torch import Tensor

from speculative.cost import Costs

DECAY = 0.98  # a round's weight after the next one: the last fifty or so count
PRIOR = 2.0  # rounds that the first guess of the acceptance is worth
FIRST_TRIAL, LAST_TRIAL = 16, 512  # rounds without drafts before a trial, at first and at most
MAY_LOSE, SHARE = 1.0, 0.02  # plain steps behind plain decoding at most: at the start, and for each token written


class AutoLength:
    """Chooses K each round from running acceptance by position. Used for one call after the other, it goes on learning."""

    def __init__(self, costs: Costs, expected: float = 0.6) -> None:
        """``expected`` acceptance of one draft before anything is known."""
        self.costs = costs
        self.kept = [PRIOR * expected] * costs.longest
        self.tried = [PRIOR] * costs.longest
        self.idle, self.patience = 0, FIRST_TRIAL
        self.written, self.saved = 0.0, 0.0  # tokens of a row, and plain steps that writing them so far has saved

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
        return next((drafts for drafts in range(wanted, 0, -1) if self.costs.round(drafts) - 1 <= free), 0)

    def observe(self, proposed: Tensor, accepted: Tensor) -> None:
        """What a round of live rows brought: ``proposed`` and ``accepted`` drafts, both (B,)."""
        accepted = torch.minimum(accepted, proposed)
        drafts, tokens = int(proposed.max()), 1.0 + float(accepted.double().mean())
        self.written += tokens
        self.saved += tokens - (self.costs.round(drafts) if drafts else 1.0)
        if drafts == 0:
            return
        place = torch.arange(self.costs.longest, device=proposed.device)
        tried = ((place < proposed[:, None]) & (place <= accepted[:, None])).float().mean(0).tolist()
        kept = (place < accepted[:, None]).float().mean(0).tolist()
        for k in range(self.costs.longest):
            if tried[k] > 0:
                self.tried[k] = DECAY * self.tried[k] + tried[k]
                self.kept[k] = DECAY * self.kept[k] + kept[k]
        if self._best() > 0:
            self.patience = FIRST_TRIAL
