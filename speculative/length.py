"""How many tokens to draft: as many as the costs of the machine and the acceptance so far make worthwhile.

Each round takes the K with the highest expected tokens per unit of time, τ(K) / (K·c + v(K+1) + o), K = 0 included.
A choice of 0 learns nothing, so a single draft is tried again now and then, ever more rarely while it does not pay.
"""

import torch
from torch import Tensor

from speculative.cost import Costs

DECAY = 0.98  # a round's weight after the next one: the last fifty or so count
PRIOR = 2.0  # rounds that the first guess of the acceptance is worth
FIRST_TRIAL, LAST_TRIAL = 16, 512  # rounds without drafts before a trial, at first and at most


class AutoLength:
    """Chooses K each round from running acceptance by position."""

    def __init__(self, costs: Costs, expected: float = 0.6) -> None:
        """``expected`` acceptance of one draft before anything is known."""
        self.costs = costs
        self.kept = [PRIOR * expected] * costs.longest
        self.tried = [PRIOR] * costs.longest
        self.idle, self.patience = 0, FIRST_TRIAL

    def choose(self) -> int:
        best = self._best()
        if best > 0:
            self.idle = 0
            return best
        self.idle += 1
        if self.idle <= self.patience:
            return 0
        self.idle, self.patience = 0, min(2 * self.patience, LAST_TRIAL)
        return 1

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

    def observe(self, proposed: Tensor, accepted: Tensor) -> None:
        """What a round of live rows brought: ``proposed`` and ``accepted`` drafts, both (B,)."""
        if not bool((proposed > 0).any()):
            return
        place = torch.arange(self.costs.longest, device=proposed.device)
        tried = ((place < proposed[:, None]) & (place <= accepted[:, None])).float().mean(0).tolist()
        kept = (place < torch.minimum(accepted, proposed)[:, None]).float().mean(0).tolist()
        for k in range(self.costs.longest):
            if tried[k] > 0:
                self.tried[k] = DECAY * self.tried[k] + tried[k]
                self.kept[k] = DECAY * self.kept[k] + kept[k]
        if self._best() > 0:
            self.patience = FIRST_TRIAL
