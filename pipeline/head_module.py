"""The Lightning module of Medusa heads: distillation as of draft models, on states that the target left in the cache.

No model runs in training: the target's states are read, and what it says further on is its head applied to later ones.
Losses, checkpoints and choice are those of ``pipeline.module``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from data.hidden_rows import HiddenBatch
from pipeline import heads as medusa_heads
from pipeline.heads import Truth
from pipeline.losses import Support
from pipeline.module import Distillation
from pipeline.validation import HeadTally, Tally
from speculative import MedusaHeads

DECAY = 0.8  # weight of each head's loss relative to the one before it (Cai et al., 2401.10774)


class HeadDistillation(Distillation):
    """Trains ``heads`` on stored states; ``head`` is the target's, (V, d) and bias (V,) or None, in float32."""

    def __init__(self, heads: MedusaHeads, head: tuple[Tensor, Tensor | None], *options: Any) -> None:
        """``options`` are those of ``Distillation`` behind the draft."""
        super().__init__(heads, *options)
        for name, tensor in zip(("head_weight", "head_bias"), head, strict=True):
            self.register_buffer(name, tensor, persistent=False)
        self._known: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by loader and batch: the target does not change

    @property
    def depths(self) -> range:
        return range(1, self.model.count + 1)

    def said(self, batch: HiddenBatch) -> tuple[Tensor, Support, Tensor]:
        """Head after head: at every position the token k further on, where the response goes on that far."""
        later = torch.cat([batch.ahead(depth)[1] for depth in self.depths])
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            p = torch.nn.functional.linear(batch.states, *self._own_rows()).softmax(-1)[later]
        ids = torch.arange(p.shape[1], device=p.device).expand_as(p)
        written = batch.tokens if self.draft_ids is None else self.draft_ids[batch.tokens]
        target = Support(ids, p, torch.zeros_like(p[:, 0]), certain=p.shape[1])
        return medusa_heads.log_q(self.model, batch, self.depths), target, written[later]

    def _own_rows(self) -> tuple[Tensor, Tensor | None]:
        """The target's head, the rows that the draft can say: p is restricted to these and renormalised."""
        ids = self.model.vocabulary
        if ids is None:
            return self.head_weight, self.head_bias
        return self.head_weight[ids], None if self.head_bias is None else self.head_bias[ids]

    def _weights(self, batch: HiddenBatch, target: Support, values: Tensor) -> Tensor:
        counts = [len(batch.ahead(depth)[0]) for depth in self.depths]
        return torch.cat([values.new_full((count,), DECAY**k) for k, count in enumerate(counts)])

    def new_tally(self, greedy: bool) -> HeadTally:
        return HeadTally([Tally(greedy) for _ in self.depths])

    def validation_step(self, labelled: tuple[HiddenBatch, Sequence[str]], batch_idx: int, dataloader_idx: int = 0) -> None:
        batch, kinds = labelled
        tally = list(self.tallies.values())[dataloader_idx]
        truth = self._truth(batch, (dataloader_idx, batch_idx))
        for depth in self.depths:
            later = batch.ahead(depth)[1]
            tally.add(depth, medusa_heads.log_q(self.model, batch, [depth]), truth.support(later), batch.rows, kinds)

    def _truth(self, batch: HiddenBatch, place: tuple[int, int]) -> Truth:
        """The target at all positions of a validation batch; what concerns all its ids is computed once."""
        with torch.autocast(self.device.type, enabled=False):
            if place not in self._known:
                self._known[place] = medusa_heads.normaliser(batch.states, self.head_weight, self.head_bias)
            total, best = self._known[place]
            logits = torch.nn.functional.linear(batch.states, *self._own_rows()).float()
        return Truth(logits - total[:, None], best if self.draft_ids is None else self.draft_ids[best])
