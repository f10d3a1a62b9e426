"""A head to begin with: least squares from the draft's last hidden states to the target's, folded into the head.

A few layers of the target end in hidden states that the target's head cannot read. The linear map W that carries them
closest to the target's own last hidden states costs seconds, and head · Wᵀ reads them as they are; hundreds of training
steps would go into finding the same.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data.batching import Batch
from pipeline.low_rank import LowRankHead
from speculative import Draft

RIDGE = 1e-3  # directions of the hidden state that are rarely visited are not trusted


def ridge(gram: Tensor, cross: Tensor, share: float) -> Tensor:
    """W that minimises ‖xW − y‖² + λ‖W‖², from xᵀx (d, d) and xᵀy (d,) or (d, e) (Hoerl & Kennard, 1970).

    λ is ``share`` of the mean of xᵀx's diagonal.
    """
    return torch.linalg.solve(penalised(gram, share), cross)


def penalised(gram: Tensor, share: float) -> Tensor:
    """xᵀx + λI (d, d)."""
    penalty = share * gram.diagonal().mean()
    return gram + penalty * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)


@torch.no_grad()
def fit_head(draft: Draft, target: PreTrainedModel, batches: Iterable[Batch]) -> None:
    """Replace the draft's head by the target's, seen through the fitted map. Only response positions count.

    A head of low rank becomes the one of its rank that solves the same penalised least squares.
    """
    widths = draft.model.config.hidden_size, target.config.hidden_size
    gram = torch.zeros(widths[0], widths[0], dtype=torch.float64)
    cross = torch.zeros(widths, dtype=torch.float64)
    for batch in batches:
        x, y = _hidden(draft.model, batch), _hidden(target, batch)
        gram += x.T @ x
        cross += x.T @ y
    head = target.get_output_embeddings().weight
    rows = head if draft.vocabulary is None else head[draft.vocabulary]
    fitted = rows.double() @ ridge(gram, cross, RIDGE).T
    own = draft.model.get_output_embeddings()
    if isinstance(own, LowRankHead):
        own.approximate(fitted, penalised(gram, RIDGE))
    else:
        own.weight.copy_(fitted)


def _hidden(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Last hidden states (N, width) in float64, after the final norm, at the positions that predict response tokens."""
    hidden = model.base_model(input_ids=batch.tokens, use_cache=False).last_hidden_state
    return hidden[batch.predicts].double()
