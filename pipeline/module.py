"""The Lightning module of distillation: the chosen objective, validation counts, optimizer and schedule.

Validation keeps sums and counts and divides last. A loss that is not finite, or far above where it began and above that
of a draft that knows nothing, stops training at once; the last checkpoint stays. It knows nothing of files.
"""

import math
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from data.batching import Batch
from pipeline import losses, objective, optimizers
from pipeline.config import Objective, Optimizer
from pipeline.errors import PipelineError
from pipeline.schedule import share_of_rate
from speculative import Draft

DIVERGED = 10  # times the larger of the first loss and ln D, the most that an even draft can lose by forward KL


class Distillation(L.LightningModule):
    """Trains a draft on batches of stored target distributions."""

    def __init__(
        self, draft: Draft, vocabulary_size: int, objective: Objective, config: Optimizer, steps: int, names: list[str]
    ) -> None:
        """``names`` are those of the validation loaders; ``vocabulary_size`` is the target's."""
        super().__init__()
        self.model, self.objective, self.config, self.steps, self.names = draft.model, objective, config, steps, names
        draft_ids = None
        if draft.vocabulary is not None:
            draft_ids = torch.full((vocabulary_size,), -1)
            draft_ids[draft.vocabulary] = torch.arange(len(draft.vocabulary))
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.sums: dict[str, list[float]] = {}
        self.limit: float | None = None  # of the loss, known after the first step

    def log_q(self, batch: Batch) -> Tensor:
        """Log-probabilities (N, D) of the draft at the marked positions; the head runs at no others."""
        hidden = self.model.base_model(input_ids=batch.tokens, use_cache=False).last_hidden_state
        logits = self.model.get_output_embeddings()(hidden[batch.predicts])
        return logits.float().log_softmax(-1)

    def written(self, batch: Batch) -> Tensor:
        """Draft ids (N,) of the tokens that follow the marked positions, −1 where the draft lacks them."""
        ids = batch.tokens.roll(-1, dims=1)[batch.predicts]
        return ids if self.draft_ids is None else self.draft_ids[ids]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        target = losses.support(batch.targets, self.draft_ids)
        loss = losses.weighted_mean(objective.values(self.objective, self.log_q(batch), target, self.written(batch)))
        self._refuse_divergence(loss.item())
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def _refuse_divergence(self, loss: float) -> None:
        if self.limit is None and math.isfinite(loss):
            self.limit = DIVERGED * max(loss, math.log(self.model.get_output_embeddings().weight.shape[0]))
        if self.limit is None or not loss <= self.limit:
            raise PipelineError(
                f"optimizer.learning_rate={self.config.learning_rate:g}: the loss is {loss:.4g} at step {self.global_step}; "
                "the last good checkpoint is kept. Lower the learning rate or optimizer.gradient_clip"
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["limit"] = self.limit

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.limit = checkpoint["limit"]

    def on_validation_epoch_start(self) -> None:
        self.sums = {name: [0.0, 0.0, 0.0, 0.0] for name in self.names}

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        log_q, target = self.log_q(batch), losses.support(batch.targets, self.draft_ids)
        values = (losses.overlap_at_least(log_q, target), losses.top1(log_q, target), losses.forward_kl(log_q, target))
        sums = self.sums[self.names[dataloader_idx]]
        sums[0] += len(log_q)
        for place, value in enumerate(values, start=1):
            sums[place] += float(value.sum())

    def on_validation_epoch_end(self) -> None:
        for name, (count, overlap, top1, divergence) in self.sums.items():
            self._refuse_divergence(divergence / count)  # before the checkpoint callback sees it
            self.log(f"{name}/overlap", overlap / count, prog_bar=name == self.names[0])
            self.log(f"{name}/top1", top1 / count)
            self.log(f"{name}/forward_kl", divergence / count)

    def configure_optimizers(self) -> dict[str, Any]:
        fast = torch.bfloat16 if str(self.trainer.precision).startswith("bf16") else torch.float32
        optimizer = optimizers.make(self.model, self.config, fast)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, self.steps, self.config))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def freeze_embedding(model: nn.Module) -> None:
    """The embedding stays the target's: it is most of a small draft's parameters and gains little."""
    model.get_input_embeddings().weight.requires_grad_(False)
