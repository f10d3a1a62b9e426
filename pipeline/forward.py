"""The target over whole responses, at the positions that predict their tokens: the teacher pass without what it is for.

Documents share rows where they fit; a document longer than a block goes through alone, block after block, over a cache, so
that attention never holds more than a block by the document. Either way a document gets what it would get alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data.branches import Branched
from data.documents import Packed, pack
from data.responses import Response
from pipeline.errors import PipelineError
from speculative.cache import CachedModel, UnsupportedModelError, check_branching

BLOCK = 2048  # tokens


def forward(model: PreTrainedModel, batch: Sequence[Response], hidden: bool, ids: int | None = None) -> list[Tensor]:
    """The logits (N, V) of each response at the positions that predict its tokens, or the ``hidden`` states (N, d).

    V is ``ids``, or all rows of the head.
    """
    short = [response for response in batch if response.length <= BLOCK]
    found = iter(_side_by_side(model, short, hidden)) if short else iter(())
    rows = [next(found) if response.length <= BLOCK else _in_blocks(model, response, hidden) for response in batch]
    return rows if hidden else [row[:, :ids] for row in rows]


def _side_by_side(model: PreTrainedModel, batch: Sequence[Response], hidden: bool) -> list[Tensor]:
    documents = [response.request.prompt + response.tokens for response in batch]
    packed = pack(documents)
    if packed.shared and not _reads_positions(model):
        packed = pack(documents, share=False)
    predicting = torch.zeros(packed.tokens.shape[1], dtype=torch.bool)  # columns in which any row predicts a response token
    spans = []
    for response, (_, first) in zip(batch, packed.places, strict=True):
        spans.append(slice(first + len(response.request.prompt) - 1, first + response.length - 1))
        predicting[spans[-1]] = True
    outputs = _outputs(model, packed, predicting.nonzero()[:, 0].to(model.device), hidden)
    places = predicting.cumsum(0) - 1  # of a column among the kept ones
    return [
        outputs[row, places[span.start] : places[span.stop - 1] + 1]
        for span, (row, _) in zip(spans, packed.places, strict=True)
    ]


def _outputs(model: PreTrainedModel, packed: Packed, keep: Tensor, hidden: bool) -> Tensor:
    """Logits or states (B, columns, …) at the columns ``keep``."""
    given = {"input_ids": packed.tokens.to(model.device), "use_cache": False}
    if packed.shared:  # else right padding comes after everything that a causal model sees at a kept position
        given |= seen(model, packed.mask(), packed.positions)
    if hidden:
        return model.base_model(**given).last_hidden_state[:, keep]
    return model(**given, logits_to_keep=keep).logits


def seen(model: PreTrainedModel, mask: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """Arguments that let a token see what ``mask`` (B, 1, T, T) says, and stand where ``positions`` (B, T) says."""
    mask = mask.to(model.device)
    if model.config._attn_implementation == "eager":  # it adds its mask, sdpa reads a boolean one
        mask = torch.where(mask, 0.0, torch.finfo(model.dtype).min).to(model.dtype)
    return {"attention_mask": mask, "position_ids": positions.to(model.device)}


def read_branches(model: PreTrainedModel, layout: Branched, hidden: bool) -> Tensor:
    """Logits (B, T, V) of rows with branches, or the last ``hidden`` states (B, T, d).

    Raises:
        PipelineError: a model whose tokens see what stands before them, whatever mask it is given.
    """
    if not _reads_positions(model):
        raise PipelineError(
            f"regime.kind=rollouts: {model.config.model_type} cannot read several continuations of one text at once; "
            "give regime=generated"
        )
    given = {"input_ids": layout.tokens.to(model.device), "use_cache": False, **seen(model, layout.mask(), layout.positions)}
    return model.base_model(**given).last_hidden_state if hidden else model(**given).logits


def _reads_positions(model: PreTrainedModel) -> bool:
    try:
        check_branching(model)
    except UnsupportedModelError:
        return False
    return True


def _in_blocks(model: PreTrainedModel, response: Response, hidden: bool) -> Tensor:
    tokens = torch.tensor([response.request.prompt + response.tokens[:-1]], device=model.device)
    places = torch.arange(tokens.shape[1], device=model.device)[None]
    first = len(response.request.prompt) - 1
    runner, parts = CachedModel(model, 1, tokens.shape[1]), []
    runner.keeps_states = hidden
    for start in range(0, tokens.shape[1], BLOCK):
        end = min(start + BLOCK, tokens.shape[1])
        kept = end - max(start, first)
        logits = runner.feed(tokens[:, start:end], places[:, start:end], max(kept, 1))
        if kept > 0:
            parts.append((runner.states if hidden else logits)[0])
    return torch.cat(parts)
