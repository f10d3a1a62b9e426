"""Stage distil: the draft learns the target's distributions from the cache; the best checkpoint by overlap is kept.

The batch order is a function of seed and step, and the last checkpoint holds optimizer and schedule, so a killed run
goes on where its last checkpoint stood.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.progress import track
from torch import Tensor
from torch.utils.data import DataLoader

from data.batching import LengthGroupedBatches, collate
from data.logit_cache import LogitCache
from data.responses import read_shards
from pipeline import draft as drafts
from pipeline import existing, trainer
from pipeline.coding import validation_name
from pipeline.config import Draft as DraftConfig
from pipeline.config import Stage
from pipeline.context import Context
from pipeline.errors import PipelineError
from pipeline.generate import eos_token_ids
from pipeline.hardware import dtype_of
from pipeline.head_fit import fit_head
from pipeline.module import Distillation, freeze_embedding
from pipeline.tracking import Run
from speculative import Draft

FORMAT = 2
FIT_BATCHES = 6  # of training rows, for the fitted head; more of them change little


def identity(context: Context) -> dict[str, Any]:
    config = context.config
    optimizer = config.optimizer
    shared = ("accelerator", "devices", "num_nodes", "strategy", "precision")
    return {
        "target": context.target.fingerprint,
        "draft": draft_identity(config.draft),
        "objective": asdict(config.objective) | {"divergence": config.objective.divergence.name},
        "optimizer": asdict(optimizer) | {"method": optimizer.method.name, "schedule": optimizer.schedule.name},
        "trainer": {key: value for key, value in asdict(config.trainer).items() if key not in shared},
        "precision": str(_precision(context)),
        "seed": config.seed,
    }


def draft_identity(config: DraftConfig) -> dict[str, Any]:
    """What shapes the draft before distillation."""
    return asdict(config) | {"files": existing.fingerprint_of(config.path)}


def run(context: Context, folder: Path, child: Run) -> tuple[dict[str, float], dict[str, Any]]:
    config = context.config.trainer
    cache = context.parent(Stage.logits).folder
    train = LogitCache(cache / "train", cache.name)
    if not len(train):
        raise PipelineError(f"corpus.train={context.config.corpus.train}: no training prompt got an answer to learn from")
    names, validation = _validation(context, cache)
    draft, coverage = initial(context)
    if not context.config.draft.train_embedding:
        freeze_embedding(draft.model)
    module = Distillation(
        draft, context.target.vocabulary_size, context.config.objective, context.config.optimizer, config.max_steps, names
    )
    module.model.train()
    checkpoints = folder / "checkpoints"
    # The first evaluation text is that of the first decoding temperature above 0, where overlap is what counts.
    keep = ModelCheckpoint(
        dirpath=checkpoints,
        filename="best",
        monitor=f"{names[0]}/overlap",
        mode="max",
        save_last=True,
        auto_insert_metric_name=False,
        enable_version_counter=False,
    )
    last = checkpoints / "last.ckpt"
    start = torch.load(last, weights_only=True, map_location="cpu")["global_step"] if last.is_file() else 0
    if start == 0 and context.config.draft.fit_head:
        order = LengthGroupedBatches(train.lengths, config.batch_size, FIT_BATCHES, context.config.seed)
        sample = DataLoader(train, batch_sampler=order, collate_fn=collate)
        fit_head(draft, context.target.load(context.dtype), track(sample, description=f"{'fit the head':<28}", transient=True))
    runner = trainer.make(
        context.config.trainer,
        folder,
        logger=child.lightning_logger(),
        callbacks=[keep],
        enable_checkpointing=True,
        precision="bf16-mixed" if _precision(context) is torch.bfloat16 else "32-true",
        max_steps=config.max_steps,
        accumulate_grad_batches=config.accumulate,
        gradient_clip_val=context.config.optimizer.gradient_clip,
        val_check_interval=min(config.validate_every, config.max_steps) * config.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
        deterministic="warn",
    )
    if start < config.max_steps:
        batches = LengthGroupedBatches(
            train.lengths,
            config.batch_size,
            config.max_steps * config.accumulate,
            context.config.seed,
            start * config.accumulate,
        )
        loader = DataLoader(train, batch_sampler=batches, collate_fn=collate)
        with trainer.interruptible(runner):
            runner.fit(module, loader, validation, ckpt_path=str(last) if start else None, weights_only=True)
    best = torch.load(checkpoints / "best.ckpt", weights_only=True, map_location="cpu")
    module.load_state_dict(best["state_dict"])
    drafts.save(Draft(module.model.eval(), draft.vocabulary), folder / "draft")
    scores = _scores(best)
    details = {
        "shape": asdict(drafts.shape(draft)),
        "vocabulary_coverage": coverage,
        "train_rows": len(train),
        "train_positions": train.positions,
        "best_step": best["global_step"],
        "epochs": config.max_steps * config.accumulate * config.batch_size / max(len(train), 1),
        "precision": str(_precision(context)),
        **scores,
    }
    return {"draft/vocabulary_coverage": coverage, **scores}, details


def initial(context: Context) -> tuple[Draft, float]:
    """The draft before distillation, and the share of generated text that its vocabulary covers."""
    config = context.config.draft
    tokenizer = context.target.tokenizer()
    source = context.target.load(torch.float32)
    size, eos = source.config.vocab_size, eos_token_ids(source, tokenizer)
    if config.path is not None:
        source = existing.load(config.path, tokenizer)
    rows = source.get_output_embeddings().weight.shape[0]
    if config.vocabulary_size and not len(eos) < config.vocabulary_size <= min(rows, size):
        raise PipelineError(
            f"draft.vocabulary_size={config.vocabulary_size}: give a number above {len(eos)} (the EOS ids) and up to "
            f"{min(rows, size)} (the vocabulary), or 0 for all"
        )
    vocabulary: Tensor | None = None
    coverage = 1.0
    if 0 < config.vocabulary_size < size:
        responses = read_shards(context.parent(Stage.generate).folder)
        texts = (response.tokens for response in responses if response.request.split == "train")
        vocabulary, coverage = drafts.choose_vocabulary(texts, config.vocabulary_size, eos)
    elif rows != size:
        vocabulary = torch.arange(len(tokenizer))  # families pad their matrices differently over one tokenizer
    return drafts.build(source, config, vocabulary), coverage


def _precision(context: Context) -> torch.dtype:
    return dtype_of(context.config.trainer.precision, context.work)


def _validation(context: Context, cache: Path) -> tuple[list[str], list[DataLoader]]:
    """Loaders of validation text by temperature, the first decoding temperature above 0 first."""
    temperatures = sorted(context.config.generate.temperatures, key=lambda t: (t == 0, t))
    size = context.config.codec.batch_size
    names = [validation_name(temperature) for temperature in temperatures]
    return names, [DataLoader(LogitCache(cache / name, cache.name), batch_size=size, collate_fn=collate) for name in names]


def _scores(checkpoint: dict[str, Any]) -> dict[str, float]:
    """The overlap that chose the checkpoint, from the callback's own state."""
    states: Iterator[dict[str, Any]] = (s for key, s in checkpoint["callbacks"].items() if "ModelCheckpoint" in key)
    return {"draft/validation_overlap": float(next(states)["best_model_score"])}
