"""Selective distillation: a draft spends itself on the tokens that a draft of its kind has been seen to learn.

A reference draft, distilled before, tells how low the loss of a position can become. The positions where the loss is
furthest above that count, the others do not (Hu et al., AdaSPEC, 2025). Where the reference fails as well, there is
nothing that a draft of this size could learn.
"""

import math
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline import draft as drafts
from pipeline.errors import PipelineError
from speculative import Draft
from speculative.drafters import head_rows


def learnable(values: Tensor, reference: Tensor, share: float) -> Tensor:
    """Weights (N,) of 0 and 1 for losses ``values`` (N,): 1 for the ``share`` furthest above those of the ``reference``."""
    excess = values.detach() - reference
    chosen = excess.topk(math.ceil(share * len(excess))).indices
    return torch.zeros_like(excess).scatter(0, chosen, 1.0)


def load(folder: str, draft: Draft) -> PreTrainedModel:
    """The reference draft in ``folder``, whose ids must be those of ``draft``.

    Raises:
        PipelineError: no draft is there, or it has other ids.
    """
    place = Path(folder).expanduser()
    if not (place / "draft.safetensors").is_file():
        raise PipelineError(
            f"objective.reference={folder}: no distilled draft; give the folder draft of a result of the stage distil"
        )
    found = drafts.load(place, torch.float32)
    rows = [head_rows(one.model) for one in (found, draft)]
    one, other = (torch.arange(rows[0]) if each.vocabulary is None else each.vocabulary for each in (found, draft))
    if rows[0] != rows[1] or not torch.equal(one, other):
        raise PipelineError(
            f"objective.reference={folder}: its draft vocabulary is not this draft's; distil it with the same "
            "draft.vocabulary_size, draft.coverage and text"
        )
    return found.model.requires_grad_(False)
