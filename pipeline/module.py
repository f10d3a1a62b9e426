"""The Lightning module of distillation: the chosen objective, validation, optimizer and schedule.

Checkpoints are to be chosen by ``CHOICE``, the speed that validation promises at estimated costs. A loss that is not
finite, or far above where it began and above that of a draft that knows nothing, stops training at once; the last
checkpoint stays. It knows nothing of files.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from data.batching import Batch
from pipeline import losses, objective, optimizers, ranks
from pipeline.config import Objective, Optimizer
from pipeline.errors import PipelineError
from pipeline.forward import seen
from pipeline.schedule import share_of_rate
from pipeline.selection import learnable
from pipeline.validation import HeadTally, Tally
from speculative import Draft, MedusaHeads
from speculative.cost import Costs

DIVERGED = 10  # times the larger of the first loss and ln D, the most that an even draft can lose by forward KL
CHOICE = "validation/ratio_estimated"


class Distillation(L.LightningModule):
    """Trains a draft on batches of stored target distributions."""

    def __init__(
        self,
        draft: Draft | MedusaHeads,
        vocabulary_size: int,
        objective: Objective,
        config: Optimizer,
        steps: int,
        texts: dict[str, float],
        costs: Costs,
        reference: PreTrainedModel | None = None,
        compile: bool = False,
    ) -> None:
        """``texts``: the temperature of each validation loader by name; ``vocabulary_size`` is the target's.

        ``reference``: a draft of the same ids that chooses the positions that count; it is no part of a checkpoint.
        ``compile``: the layers run as a compiled program.
        """
        super().__init__()
        self.model = draft.model if isinstance(draft, Draft) else draft
        self.size, self.objective, self.config, self.steps = draft.size, objective, config, steps
        self.texts, self.costs = texts, costs
        self.reference = None if reference is None else partial(log_q_of, reference)
        self.compiles = compile
        draft_ids = None
        if draft.vocabulary is not None:
            draft_ids = torch.full((vocabulary_size,), -1)
            draft_ids[draft.vocabulary] = torch.arange(len(draft.vocabulary))
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.tallies: dict[str, Tally | HeadTally] = {}
        self.validated: dict[str, float] = {}  # what the last validation found, kept with its checkpoint
        self.limit: float | None = None  # of the loss, known after the first step

    def log_q(self, batch: Batch) -> Tensor:
        """Log-probabilities (N, D) of the draft at the marked positions; the head runs at no others."""
        return log_q_of(self.model, batch)

    def written(self, batch: Batch) -> Tensor:
        """Draft ids (N,) of the tokens that follow the marked positions, −1 where the draft lacks them."""
        if batch.branched is not None:  # nobody wrote what follows
            return torch.full((len(batch.weights),), -1, device=batch.tokens.device)
        ids = batch.tokens.roll(-1, dims=1)[batch.predicts]
        return ids if self.draft_ids is None else self.draft_ids[ids]

    def said(self, batch: Batch) -> tuple[Tensor, losses.Support, Tensor]:
        """Log-probabilities of the draft, the target's distributions and the tokens written, at N positions."""
        return self.log_q(batch), losses.support(batch.targets, self.draft_ids), self.written(batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        log_q, target, written = self.said(batch)
        values = objective.values(self.objective, log_q, target, written)
        weights = self._weights(batch, target, values)
        portion = ranks.portion(values.new_tensor(len(values)) if weights is None else weights.sum())
        if isinstance(batch, Batch) and batch.branched is not None and not bool(weights.any()):
            loss = 0 * values.sum()  # no round comes to any of these places
        else:
            loss = losses.weighted_mean(values, weights) * portion
        found = ranks.mean(loss)
        self._refuse_divergence(found.item())
        self.log("train/loss", found, prog_bar=True)
        return loss

    @torch.no_grad()
    def _weights(self, batch: Batch, target: losses.Support, values: Tensor) -> Tensor | None:
        if batch.branched is not None:
            return batch.weights
        if self.reference is None:
            return None
        log_q = self.reference(batch)
        learnt = objective.values(self.objective, log_q, target, self.written(batch))
        return learnable(values, learnt, self.objective.keep)

    def on_fit_start(self) -> None:
        if self.compiles:
            self.model.base_model.compile(dynamic=True)  # in place: names of parameters stay
        if self.reference is not None:
            self.reference.args[0].to(self.device)

    def _refuse_divergence(self, loss: float) -> None:
        if self.limit is None and math.isfinite(loss):
            self.limit = DIVERGED * max(loss, math.log(self.size))
        if self.limit is None or not loss <= self.limit:
            raise PipelineError(
                f"optimizer.learning_rate={self.config.learning_rate:g}: the loss is {loss:.4g} at step {self.global_step}; "
                "the last good checkpoint is kept. Lower the learning rate or optimizer.gradient_clip"
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["limit"], checkpoint["validated"] = self.limit, self.validated

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.limit = checkpoint["limit"]

    def on_validation_epoch_start(self) -> None:
        self.tallies = {name: self.new_tally(temperature == 0) for name, temperature in self.texts.items()}

    def new_tally(self, greedy: bool) -> Tally | HeadTally:
        return Tally(greedy)

    def validation_step(self, labelled: tuple[Batch, Sequence[str]], batch_idx: int, dataloader_idx: int = 0) -> None:
        """``labelled``: a batch, and the kind of prompt of each of its rows."""
        batch, kinds = labelled
        tally = list(self.tallies.values())[dataloader_idx]
        tally.add(self.log_q(batch), losses.support(batch.targets, self.draft_ids), batch.predicts.sum(1).tolist(), kinds)

    def on_validation_epoch_end(self) -> None:
        found: dict[str, float] = {}
        for name, tally in self.tallies.items():
            means = tally.means()
            self._refuse_divergence(means["forward_kl"])  # before the checkpoint callback sees it
            found |= {f"{name}/{key}": value for key, value in means.items()}
        ratios = [tally.ratio(self.costs) for tally in self.tallies.values()]
        self.validated = found | {CHOICE: sum(ratios) / len(ratios)}
        self.log_dict(self.validated)
        self.log("overlap", found[f"{next(iter(self.texts))}/overlap"], prog_bar=True, logger=False)

    def configure_optimizers(self) -> dict[str, Any]:
        fast = torch.bfloat16 if str(self.trainer.precision).startswith("bf16") else torch.float32
        optimizer = optimizers.make(self.model, self.config, fast)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, self.steps, self.config))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def log_q_of(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Log-probabilities (N, D) of ``model`` at the marked positions."""
    layout = batch.branched
    given = {} if layout is None else seen(model, layout.mask(), layout.positions)
    hidden = model.base_model(input_ids=batch.tokens, use_cache=False, **given).last_hidden_state
    return model.get_output_embeddings()(hidden[batch.predicts]).float().log_softmax(-1)


def freeze_embedding(model: nn.Module) -> None:
    """The embedding stays the target's: it is most of a small draft's parameters and gains little."""
    model.get_input_embeddings().weight.requires_grad_(False)
