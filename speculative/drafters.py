"""Drafters: who proposes the next K tokens.

A draft model keeps its own slot cache, one token behind or more after a fully accepted block; the next proposal feeds
whatever it has not seen yet. It knows nothing of the target, only the committed tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from speculative.cache import CachedModel
from speculative.sampling import Purpose, Sampling, draw, probabilities, uniforms


@dataclass(frozen=True)
class Draft:
    """A small causal LM. ``vocabulary`` (D,), sorted, is the target id of each of its output ids; None means equal."""

    model: PreTrainedModel
    vocabulary: Tensor | None = None

    def __post_init__(self) -> None:
        if self.vocabulary is not None and not bool((self.vocabulary.diff() > 0).all()):
            raise ValueError("the draft vocabulary must be sorted and without repeats")

    def check_fits(self, target_size: int) -> None:
        """Raise ValueError unless every output id of the draft stands for one of ``target_size`` target ids."""
        outputs = self.model.get_output_embeddings().weight.shape[0]
        if self.vocabulary is None and outputs != target_size:
            raise ValueError(f"the draft has {outputs} output ids, the target {target_size}: give the draft a vocabulary")
        if self.vocabulary is not None and (len(self.vocabulary) != outputs or int(self.vocabulary[-1]) >= target_size):
            raise ValueError(f"the draft's vocabulary must have {outputs} ids below {target_size}")


@dataclass(frozen=True)
class Proposal:
    """``tokens`` (B, K) in the target's ids and ``probabilities`` (B, K, D) they were drawn from; None if greedy."""

    tokens: Tensor
    probabilities: Tensor | None


class ModelDrafter:
    """Draws K tokens from a draft model, for every row of a batch."""

    def __init__(self, draft: Draft, batch: int, capacity: int, sampling: Sampling, seed: int) -> None:
        self.vocabulary = draft.vocabulary
        self.cached = CachedModel(draft.model, batch, capacity)
        self.sampling, self.seed = sampling, seed
        self.lengths = torch.zeros(batch, dtype=torch.long, device=draft.model.device)  # valid slots by row
        self.forwards = 0

    def prefill(self, tokens: Tensor, lengths: Tensor) -> None:
        """Read the first ``lengths`` (B,) tokens of each row of right-padded ``tokens``."""
        self.cached.prefill(tokens, lengths)
        self.lengths = lengths

    def propose(self, tokens: Tensor, lengths: Tensor, rows: Tensor, count: int) -> Proposal:
        """Draft ``count`` tokens after the committed ``tokens`` (B, capacity) of ``lengths`` (B,)."""
        # Every row is fed as many tokens as the row furthest behind needs; re-feeding a token rewrites its own slot.
        # No row is shorter than that: rows fall behind by one a round, and every row grows by at least one.
        behind = int((lengths - self.lengths).max())
        offsets = torch.arange(behind, device=tokens.device)
        positions = lengths[:, None] - behind + offsets
        feed = tokens.gather(1, positions)
        drafted, distributions = [], []
        for step in range(count):
            logits = self.cached.feed(feed, positions, keep=1)[:, -1]
            feed, distribution = self._choose(logits, rows, lengths + step)
            drafted.append(feed)
            distributions.append(distribution)
            positions = (lengths + step)[:, None]
        self.forwards += count
        self.lengths = lengths + count - 1
        return Proposal(torch.cat(drafted, 1), None if self.sampling.greedy else torch.stack(distributions, 1))

    def _choose(self, logits: Tensor, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.sampling.greedy:
            chosen, distribution = logits.argmax(-1), None
        else:
            distribution = probabilities(logits, self.sampling)
            chosen = draw(distribution, uniforms(self.seed, rows, positions, Purpose.DRAFT))
        return (chosen if self.vocabulary is None else self.vocabulary[chosen])[:, None], distribution

    def rollback(self, lengths: Tensor) -> None:
        """Forget everything beyond the committed ``lengths`` (B,) less the anchor, the last committed token."""
        self.lengths = torch.minimum(self.lengths, lengths - 1)

    def select(self, rows: Tensor) -> None:
        """Keep the given rows of the batch."""
        self.cached.cache.select(rows)
        self.lengths = self.lengths[rows]
