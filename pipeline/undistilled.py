"""The draft before distillation: which model it comes from, and which ids it can say.

Calibration times it and speculation compares with it, so all three stages build the same one. How a model is cut down is
not known here.
"""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data.responses import read_shards
from pipeline import draft as drafts
from pipeline import existing, heads, low_rank, narrow
from pipeline.choices import Drafting, Stage
from pipeline.config import Draft as DraftConfig
from pipeline.context import Context
from pipeline.errors import PipelineError
from pipeline.generate import eos_token_ids
from pipeline.proposer import Proposer
from speculative import Draft


def draft_identity(config: DraftConfig) -> dict[str, Any]:
    """What shapes the draft before distillation."""
    if config.kind is Drafting.medusa:
        return {"kind": config.kind.name, **{key: getattr(config, key) for key in ("heads", "vocabulary_size", "coverage")}}
    of_models = {key: value for key, value in asdict(config).items() if key not in ("kind", "heads")}
    if config.head_rank is None:
        del of_models["head_rank"]
    return of_models | {"files": existing.fingerprint_of(config.path and existing.located(config.path))}


def initial(context: Context) -> tuple[Proposer, float]:
    """The draft before distillation, and the share of generated text that its vocabulary covers."""
    return cut_from(context, context.target.load(torch.float32))


def cut_from(context: Context, target: PreTrainedModel) -> tuple[Proposer, float]:
    """The same, from a ``target`` that is loaded already, in float32."""
    config = context.config.draft
    if config.path is not None and existing.distilled(config.path):
        found = drafts.load(existing.located(config.path), torch.float32)
        return found, 1.0 if found.vocabulary is None else _covered(context, found)
    tokenizer = context.target.tokenizer()
    source, size, eos = target, target.config.vocab_size, eos_token_ids(target, tokenizer)
    if existing.as_it_is(context.config):
        shared = existing.of_other_tokenizer(str(config.path), tokenizer, size)
        if shared is not None:
            return shared, _covered(context, shared)
    if config.path is not None:
        source = existing.load(config.path, tokenizer)
    rows = source.get_output_embeddings().weight.shape[0]
    most = min(rows, size)
    if config.vocabulary_size and not len(eos) < config.vocabulary_size <= most:
        raise PipelineError(
            f"draft.vocabulary_size={config.vocabulary_size}: give a number above {len(eos)} (the EOS ids) and up to "
            f"{most} (the vocabulary), or 0 for all"
        )
    texts = [r.tokens for r in read_shards(context.parent(Stage.generate).folder) if r.request.split == "train"]
    wanted = _size(config, texts, eos, most)
    vocabulary: Tensor | None = None
    coverage = 1.0
    if 0 < wanted < size:
        vocabulary, coverage = drafts.choose_vocabulary(texts, wanted, eos)
    elif rows != size:
        vocabulary = torch.arange(len(tokenizer))  # families pad their matrices differently over one tokenizer
    if config.kind is Drafting.medusa:
        return heads.build(target, config.heads, vocabulary), coverage
    if config.width is not None:
        made = narrow.build(source, config.width, len(config.layers), vocabulary, context.config.seed)
    else:
        made = drafts.build(source, config, vocabulary)
    if config.head_rank is not None:
        low_rank.factor(made.model, config.head_rank)
    return made, coverage


def _covered(context: Context, draft: Draft) -> float:
    """The share of all generated text that ``draft`` could have proposed."""
    texts = [torch.tensor(r.tokens) for r in read_shards(context.parent(Stage.generate).folder) if r.tokens]
    return float(torch.isin(torch.cat(texts), draft.vocabulary).double().mean()) if texts else 0.0


def _size(config: DraftConfig, texts: Iterable[Iterable[int]], eos: list[int], most: int) -> int:
    """Ids of the draft: ``vocabulary_size``, or as few as ``coverage`` asks for and no more than that; 0 is all."""
    if config.coverage is None:
        return config.vocabulary_size
    needed, limit = drafts.smallest_vocabulary(texts, config.coverage, eos), config.vocabulary_size or most
    if needed > limit:
        raise PipelineError(
            f"draft.coverage={config.coverage}: draft.vocabulary_size={limit} ids cover less of the generated text, it needs "
            f"{needed}; raise draft.vocabulary_size (0 sets no limit) or lower draft.coverage"
        )
    return needed
