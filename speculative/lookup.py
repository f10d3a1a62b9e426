"""Drafts without a draft model: what followed the last few tokens the last time they stood in the text.

Answers repeat their prompts: code, quotations, names (Saxena, 2023, prompt lookup decoding). The tokens are named, not
drawn, so q is one at the token; alone, or with a draft model for the rows where nothing matches.
"""

import torch
from torch import Tensor

from speculative.drafters import AroundModel, ModelDrafter, Proposal
from speculative.verification import Guess


class PromptLookup:
    """Looks for the last n tokens, longest n first, most recent place first, in prompt and output."""

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        """``longest`` and ``shortest`` n-gram that may match.

        Raises:
            ValueError: unless 1 ≤ shortest ≤ longest.
        """
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams need 1 ≤ shortest ≤ longest, not {shortest} and {longest}")
        self.longest, self.shortest = longest, shortest
        self.forwards = 0

    def prefill(self, tokens: Tensor, lengths: Tensor) -> None:
        """Nothing is kept: every search reads the text itself."""

    def propose(self, tokens: Tensor, lengths: Tensor, rows: Tensor, count: int) -> Proposal:
        counts = torch.zeros_like(lengths)
        starts = torch.zeros_like(lengths)
        width = tokens.shape[1]
        place = torch.arange(width, device=tokens.device)
        for size in range(self.longest, self.shortest - 1, -1):
            if size >= width:
                continue
            suffix = tokens.gather(1, (lengths[:, None] - size + torch.arange(size, device=tokens.device)).clamp(min=0))
            match = (tokens.unfold(1, size, 1) == suffix[:, None]).all(-1)  # (B, width − size + 1): starts of n-grams
            # A match must end before the text does, or nothing follows it; the suffix itself ends there.
            match &= place[: match.shape[1]] + size < lengths[:, None]
            match &= (lengths > size)[:, None] & (counts == 0)[:, None]
            last = torch.where(match, place[: match.shape[1]], -1).amax(-1)
            found = last >= 0
            starts = torch.where(found, last + size, starts)
            counts = torch.where(found, count, counts)
        # Past the end of the text the passage begins again, as loops do.
        period = (lengths - starts).clamp(min=1)[:, None]
        drafted = tokens.gather(1, starts[:, None] + torch.arange(count, device=tokens.device) % period)
        return Proposal(Guess(drafted, None), counts)

    def rollback(self, lengths: Tensor) -> None:
        """Nothing was kept."""

    def select(self, rows: Tensor) -> None:
        """Nothing is kept by row."""


class LookupElseModel(AroundModel):
    """Prompt lookup where it matches, the draft model in the other rows; the model is not run when all rows match."""

    def __init__(self, lookup: PromptLookup, model: ModelDrafter) -> None:
        super().__init__(model)
        self.lookup = lookup

    def propose(self, tokens: Tensor, lengths: Tensor, rows: Tensor, count: int) -> Proposal:
        looked = self.lookup.propose(tokens, lengths, rows, count)
        certain = looked.counts > 0
        if bool(certain.all()):
            return looked
        drawn = self.model.propose(tokens, lengths, rows, count)
        # In rows that matched, the model's cache holds drafts of its own that nobody will see.
        self.model.lengths = torch.where(certain, lengths, self.model.lengths)
        if not bool(certain.any()):
            return drawn
        # The model may have stopped early, which must not cut the drafts of rows that matched.
        tokens_of_both = torch.where(certain[:, None], looked.guess.tokens, _as_long(drawn.guess.tokens, count))
        counts = torch.where(certain, looked.counts, drawn.counts)
        if drawn.guess.q is None:
            return Proposal(Guess(tokens_of_both, None), counts)
        return Proposal(Guess(tokens_of_both, _as_long(drawn.guess.q, count), drawn.guess.vocabulary, certain), counts)


def _as_long(drawn: Tensor, count: int) -> Tensor:
    """``drawn`` (B, n, …) with its last place repeated up to ``count``; nothing there is ever looked at."""
    missing = count - drawn.shape[1]
    return torch.cat([drawn, *[drawn[:, -1:]] * missing], 1) if missing else drawn
