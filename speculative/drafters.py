"""Drafters: who proposes the next K tokens.

A drafter reads the committed tokens and nothing of the target. Slots of the token buffer beyond a row's length are
scratch: drafts are written there, so that what looks at the text sees them in place.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from speculative.cache import CachedModel
from speculative.controls import History
from speculative.sampling import Purpose, Sampling, draw, probabilities, round_keys, uniforms
from speculative.verification import Guess


def head_rows(model: PreTrainedModel) -> int:
    """Logits of ``model``. A head of several matrices tells its ``rows``, for its ``weight`` is a product to compute."""
    head = model.get_output_embeddings()
    rows: int | None = getattr(head, "rows", None)
    return head.weight.shape[0] if rows is None else rows


@dataclass(frozen=True)
class Draft:
    """A small causal LM. ``vocabulary`` (D,), sorted, is the target id of each of its output ids; None means equal.

    ``outputs`` (D,) are the rows of its head that these are, None: all. ``inputs`` (V,) is the id under which it reads
    each target id, None: the same. Both serve drafts with another tokenizer (see ``speculative.vocabulary``).
    """

    model: PreTrainedModel
    vocabulary: Tensor | None = None
    outputs: Tensor | None = None
    inputs: Tensor | None = None

    def __post_init__(self) -> None:
        if self.vocabulary is not None and not bool((self.vocabulary.diff() > 0).all()):
            raise ValueError("the draft vocabulary must be sorted and without repeats")

    @property
    def size(self) -> int:
        """Ids that can be drafted, D."""
        return head_rows(self.model) if self.outputs is None else len(self.outputs)

    def cut(self, size: int) -> "Draft":
        """The same draft without what it has beyond the first ``size`` target ids: rows that pad its head.

        Raises:
            ValueError: nothing is left.
        """
        count = size if self.vocabulary is None else int((self.vocabulary < size).sum())
        if count >= self.size:
            return self
        if count == 0:
            raise ValueError(f"the draft's vocabulary has no id below {size}, the number of the target's tokens")
        outputs = torch.arange(count, device=self.model.device) if self.outputs is None else self.outputs[:count]
        return replace(self, vocabulary=None if self.vocabulary is None else self.vocabulary[:count], outputs=outputs)

    def placed(self) -> "Draft":
        """The same draft with its tables on the device of its model."""
        tables = {name: getattr(self, name) for name in ("vocabulary", "outputs", "inputs")}
        device = self.model.device
        return replace(self, **{name: None if table is None else table.to(device) for name, table in tables.items()})

    def check_fits(self, target_size: int) -> None:
        """Raise ValueError unless the draft reads ``target_size`` target ids and each of its output ids stands for one."""
        outputs = self.size
        if self.vocabulary is None and outputs != target_size:
            raise ValueError(f"the draft has {outputs} output ids, the target {target_size}: give the draft a vocabulary")
        if self.vocabulary is not None and (len(self.vocabulary) != outputs or int(self.vocabulary[-1]) >= target_size):
            raise ValueError(f"the draft's vocabulary must have {outputs} ids below {target_size}")
        if self.inputs is not None and len(self.inputs) < target_size:
            raise ValueError(f"the draft reads {len(self.inputs)} ids, the target writes {target_size}")
        head, embedding = head_rows(self.model), len(self.model.get_input_embeddings().weight)
        if self.outputs is not None and int(self.outputs.max()) >= head:
            raise ValueError(f"the draft's outputs name row {int(self.outputs.max())} of its head, which has {head}")
        largest = target_size - 1 if self.inputs is None else int(self.inputs[:target_size].max())
        if largest >= embedding:
            raise ValueError(f"the draft would read id {largest}, its embedding has {embedding} rows: give the draft inputs")


@dataclass(frozen=True)
class Proposal:
    """A guess and how many of its tokens count, by row: ``counts`` (B,) ≤ K. Tokens behind are arbitrary ids."""

    guess: Guess
    counts: Tensor


class Drafter(Protocol):
    """What the engine asks of one."""

    def prefill(self, tokens: Tensor, lengths: Tensor) -> None:
        """Read the first ``lengths`` (B,) tokens of each row of right-padded ``tokens`` (B, capacity)."""

    def propose(self, tokens: Tensor, lengths: Tensor, rows: Tensor, count: int) -> Proposal:
        """Draft ``count`` tokens after the committed ``tokens`` of ``lengths`` (B,); ``rows`` (B,) key the random numbers."""

    def rollback(self, lengths: Tensor) -> None:
        """Forget everything beyond the committed ``lengths`` (B,) less the anchor, the last committed token."""

    def select(self, rows: Tensor) -> None:
        """Keep the given rows of the batch."""


class ModelDrafter:
    """Draws K tokens from a draft model, for every row of a batch."""

    def __init__(
        self,
        draft: Draft,
        batch: int,
        capacity: int,
        sampling: Sampling,
        seed: int,
        history: History | None = None,
        confidence: float = 0.0,
    ) -> None:
        """A row stops drafting once the best token's probability at temperature 1 falls below ``confidence``."""
        self.draft, self.sampling, self.seed, self.history, self.confidence = draft, sampling, seed, history, confidence
        self.cached = CachedModel(draft.model, batch, capacity)
        self.lengths = torch.zeros(batch, dtype=torch.long, device=draft.model.device)  # valid slots by row
        self.forwards = 0

    def prefill(self, tokens: Tensor, lengths: Tensor) -> None:
        self.cached.prefill(self.read(tokens), lengths)
        self.lengths = lengths

    def catch_up(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Feed what was committed since; logits (B, D) of the token after it."""
        # Every row is fed as many tokens as the row furthest behind needs; re-feeding a token rewrites its own slot.
        behind = int((lengths - self.lengths).max())
        positions = (lengths[:, None] - behind + torch.arange(behind, device=tokens.device)).clamp(min=0)
        return self._feed(tokens.gather(1, positions), positions)

    def propose(self, tokens: Tensor, lengths: Tensor, rows: Tensor, count: int) -> Proposal:
        distributions: list[Tensor] = []
        going = torch.ones_like(lengths, dtype=torch.bool)
        counts = torch.zeros_like(lengths)
        logits = self.catch_up(tokens, lengths)
        for step in range(count):
            if step > 0:
                last = (lengths + step - 1)[:, None]
                logits = self._feed(tokens.gather(1, last), last)
            if self.confidence:
                # Decided by the text before the token, never by the token: the law of what is drawn stays q.
                going = going & (logits.float().softmax(-1).amax(-1) >= self.confidence)
            chosen, distribution = self._choose(logits, tokens, lengths + step, rows, round_keys(lengths, step))
            tokens.scatter_(1, (lengths + step)[:, None], chosen)
            if distribution is not None:
                distributions.append(distribution)
            counts += going
            if not bool(going.any()):
                break
        drafted = step + 1
        self.forwards += drafted
        self.lengths = lengths + drafted - 1
        block = tokens.gather(1, lengths[:, None] + torch.arange(drafted, device=tokens.device))
        q = torch.stack(distributions, 1) if distributions else None
        return Proposal(Guess(block, q, self.draft.vocabulary), counts)

    def _feed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.choosable(self.cached.feed(self.read(tokens), positions, keep=1)[:, -1])

    def read(self, tokens: Tensor) -> Tensor:
        """Target ids as the draft reads them."""
        return tokens if self.draft.inputs is None else self.draft.inputs[tokens]

    def choosable(self, logits: Tensor) -> Tensor:
        """Logits (..., D) of the ids that may be drafted."""
        return logits if self.draft.outputs is None else logits[..., self.draft.outputs]

    def _choose(
        self, logits: Tensor, tokens: Tensor, lengths: Tensor, rows: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The next token (B, 1) in target ids, and the distribution (B, D) it was drawn from; None if greedy."""
        vocabulary = self.draft.vocabulary
        logits = self.controlled(logits, tokens, lengths)
        if self.sampling.greedy:
            chosen, distribution = logits.argmax(-1), None
        else:
            distribution = probabilities(logits, self.sampling)
            chosen = draw(distribution, uniforms(self.seed, rows, keys, Purpose.DRAFT))
        return (chosen if vocabulary is None else vocabulary[chosen])[:, None], distribution

    def controlled(self, logits: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Logits (B, D) with the controls, as ``History.apply`` has them."""
        history, vocabulary = self.history, self.draft.vocabulary
        if history is None:
            return logits
        found = logits.float()
        if vocabulary is None:
            found = history.apply(found, tokens, lengths)
        else:
            whole = found.new_full((len(found), history.vocabulary_size), -torch.inf)
            whole[:, vocabulary] = found
            found = history.apply(whole, tokens, lengths)[:, vocabulary]
        # Where the controls bar every token that the draft has, it proposes what it would have, and is corrected.
        return torch.where(found.amax(-1, keepdim=True).isfinite(), found, logits.float())

    def rollback(self, lengths: Tensor) -> None:
        self.lengths = torch.minimum(self.lengths, lengths - 1)

    def select(self, rows: Tensor) -> None:
        self.cached.cache.select(rows)
        self.lengths = self.lengths[rows]
        if self.history is not None:
            self.history = self.history.select(rows)


class AroundModel:
    """A drafter that proposes with a ``ModelDrafter`` in a way of its own; what concerns the model's cache is passed on."""

    def __init__(self, model: ModelDrafter) -> None:
        self.model = model

    @property
    def forwards(self) -> int:
        return self.model.forwards

    def prefill(self, tokens: Tensor, lengths: Tensor) -> None:
        self.model.prefill(tokens, lengths)

    def rollback(self, lengths: Tensor) -> None:
        self.model.rollback(lengths)

    def select(self, rows: Tensor) -> None:
        self.model.select(rows)
