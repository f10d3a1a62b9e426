"""Stage distil: the draft learns the target's distributions from the cache; the checkpoint that promises most speed stays.

The batch order is a function of seed and step, and the last checkpoint holds optimizer and schedule, so a killed run
goes on where its last checkpoint stood.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from rich.progress import track
from torch.utils.data import ConcatDataset, DataLoader, StackDataset
from transformers import PreTrainedModel

from data import hidden_rows
from data.batching import Divided, LengthGroupedBatches, Mixed, collate
from data.hidden_rows import HiddenRows
from data.logit_cache import LogitCache
from pipeline import existing, outlook, proposer, ready, selection, trainer
from pipeline.choices import Drafting, Stage, Text
from pipeline.coding import responses, validation_kinds, validation_name
from pipeline.config import Config, Trainer
from pipeline.context import Context
from pipeline.errors import PipelineError
from pipeline.hardware import dtype_of
from pipeline.head_fit import fit_head
from pipeline.head_module import HeadDistillation
from pipeline.module import CHOICE, Distillation, freeze_embedding
from pipeline.outlook import Outlook
from pipeline.proposer import Proposer
from pipeline.teacher import ROLLOUTS
from pipeline.tracking import Run
from pipeline.undistilled import cut_from, draft_identity
from speculative import Draft

FORMAT = 3
FIT_BATCHES = 6  # of training rows, for the fitted head; more of them change little


def identity(context: Context) -> dict[str, Any]:
    config = context.config
    optimizer = config.optimizer
    reference = {"reference_files": existing.fingerprint_of(config.objective.reference)}
    shared = ("accelerator", "devices", "num_nodes", "strategy", "precision", "seed")
    return {
        "target": context.target.fingerprint,
        "draft": draft_identity(config.draft),
        "objective": asdict(config.objective) | {"divergence": config.objective.divergence.name} | reference,
        "optimizer": asdict(optimizer) | {"method": optimizer.method.name, "schedule": optimizer.schedule.name},
        "trainer": {key: value for key, value in asdict(config.trainer).items() if key not in shared and value is not False},
        "precision": str(_precision(context)),
        "seed": _seed(context),
        **({"regime": {"share": config.regime.share}} if config.regime.kind is Text.rollouts else {}),
        **({"processes": _processes(config.trainer)} if _processes(config.trainer) > 1 else {}),
    }


def _processes(trainer: Trainer) -> int:
    """How many train together; ``batch_size`` is of each."""
    return trainer.devices * trainer.num_nodes


def run(context: Context, folder: Path, child: Run) -> tuple[dict[str, float], dict[str, Any]]:
    train, rollouts, texts, validation = _data(context)
    if len(train) < _processes(context.config.trainer):
        raise PipelineError(f"trainer.devices={context.config.trainer.devices}: {len(train)} rows are too few to share; give 1")
    target = context.target.load(torch.float32)
    draft, coverage = cut_from(context, target)
    expected = outlook.foresee(draft, target, context.dtype)
    outlook.show(expected)
    last = folder / "checkpoints" / "last.ckpt"
    start = torch.load(last, weights_only=True, map_location="cpu")["global_step"] if last.is_file() else 0
    if isinstance(draft, Draft) and start == 0 and context.config.draft.fit_head and not _goes_on(context):
        _fit_head(context, draft, target.to(context.dtype), train)
    del target
    config = context.config
    module = _module(context, draft, train, texts, expected)
    module.model.train()
    steps = start
    if start < config.trainer.max_steps:
        loader = _loader(train, config, config.trainer.max_steps * config.trainer.accumulate, _seed(context), start, rollouts)
        runner = _runner(context, folder, child)
        with trainer.interruptible(runner):
            runner.fit(module, loader, validation, ckpt_path=str(last) if start else None, weights_only=True)
        steps = runner.global_step or torch.load(last, weights_only=True, map_location="cpu")["global_step"]  # other processes'
    best = torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True, map_location="cpu")
    module.load_state_dict(best["state_dict"])
    module.model.eval()  # that of ``draft``
    proposer.save(draft, folder / "draft", context.target.fingerprint)
    metrics, details = _record(context, expected, coverage, best)
    seen = steps * config.trainer.accumulate * config.trainer.batch_size * _processes(config.trainer) / len(train)
    return metrics, details | {"train_rows": len(train), "train_positions": train.positions, "epochs": seen}


def _module(
    context: Context, draft: Proposer, train: LogitCache | HiddenRows, texts: dict[str, float], expected: Outlook
) -> Distillation:
    config = context.config
    settings = (config.objective, config.optimizer, config.trainer.max_steps, texts, expected.costs)
    size, reference = context.target.vocabulary_size, config.objective.reference
    if isinstance(train, HiddenRows):
        return HeadDistillation(draft, train.cache.head(), size, *settings)
    if not config.draft.train_embedding:
        freeze_embedding(draft.model)
    chosen = None if reference is None else selection.load(reference, draft)
    if config.trainer.compile:
        ready.keep_compiled(context, "the training of the draft")
    return Distillation(draft, size, *settings, chosen, config.trainer.compile)


def _goes_on(context: Context) -> bool:
    """Whether training goes on with a draft that was distilled before, whose head has learnt already."""
    path = context.config.draft.path
    return path is not None and existing.distilled(path)


def _data(context: Context) -> tuple[LogitCache | HiddenRows, LogitCache | None, dict[str, float], list[DataLoader]]:
    """Training rows, and those that a draft continues; validation text by name with its temperature, the first above 0
    first; and loaders of it.

    A batch of validation text comes with the kinds of its prompts, whichever process reads which rows.
    """
    temperatures = sorted(context.config.generate.temperatures, key=lambda t: (t == 0, t))
    texts = {validation_name(temperature): temperature for temperature in temperatures}
    cache = context.parent(Stage.logits).folder
    parts = {name: LogitCache(cache / name, cache.name) for name in ("train", *texts)}
    train, collated, written = parts.pop("train"), collate, responses(context)
    kinds = {name: validation_kinds(written, temperature, parts[name]) for name, temperature in texts.items()}
    if context.config.draft.kind is Drafting.medusa:
        train, collated = HiddenRows(train, shortest=2), hidden_rows.collate  # the first head looks one token ahead
        parts = {name: HiddenRows(part) for name, part in parts.items()}
        kinds = {name: [kinds[name][place] for place in part.index] for name, part in parts.items()}
    if not len(train):
        raise PipelineError(f"corpus.train={context.config.corpus.train}: no training prompt got an answer to learn from")
    size = context.config.codec.batch_size
    rollouts = LogitCache(cache / ROLLOUTS, cache.name) if context.config.regime.kind is Text.rollouts else None
    with_kinds = partial(_with_kinds, collated)
    labelled = [StackDataset(part, kinds[name]) for name, part in parts.items()]
    return train, rollouts, texts, [DataLoader(one, batch_size=size, collate_fn=with_kinds) for one in labelled]


def _with_kinds(collated: Callable[[Sequence[Any]], Any], rows: Sequence[tuple[Any, str]]) -> tuple[Any, tuple[str, ...]]:
    """A batch of rows, and their kinds."""
    plain, kinds = zip(*rows, strict=True)
    return collated(plain), kinds


def _loader(
    train: LogitCache | HiddenRows, config: Config, batches: int, seed: int, start: int = 0, rollouts: LogitCache | None = None
) -> DataLoader:
    """``batches`` batches of training rows, a share of them of ``rollouts``, less those of the first ``start`` steps."""
    first, count = start * config.trainer.accumulate, _processes(config.trainer)
    size = config.trainer.batch_size * count
    if rollouts is not None:
        both = [LengthGroupedBatches(part.lengths, size, batches, seed, least=count) for part in (train, rollouts)]
        order = Divided(Mixed(*both, len(train), config.regime.share, first))
        return DataLoader(ConcatDataset([train, rollouts]), batch_sampler=order, collate_fn=collate)
    order = Divided(LengthGroupedBatches(train.lengths, size, batches, seed, first, count))
    return DataLoader(train, batch_sampler=order, collate_fn=hidden_rows.collate if isinstance(train, HiddenRows) else collate)


def _fit_head(context: Context, draft: Draft, target: PreTrainedModel, train: LogitCache) -> None:
    sample = _loader(train, context.config, FIT_BATCHES, _seed(context))
    fit_head(draft, target, track(sample, description=f"{'fit the head':<28}", transient=True))


def _runner(context: Context, folder: Path, child: Run) -> L.Trainer:
    config = context.config.trainer
    keep = ModelCheckpoint(
        dirpath=folder / "checkpoints",
        filename="best",
        monitor=CHOICE,
        mode="max",
        save_last=True,
        auto_insert_metric_name=False,
        enable_version_counter=False,
    )
    stop = [EarlyStopping(CHOICE, mode="max", patience=config.patience)] if config.patience else []
    return trainer.make(
        config,
        folder,
        logger=child.lightning_logger(),
        callbacks=[*stop, keep],
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
        use_distributed_sampler=False,
    )


def _record(
    context: Context, expected: Outlook, coverage: float, best: dict[str, Any]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics and details of the checkpoint that was kept."""
    found = best["validated"]
    scores = {
        "draft/vocabulary_coverage": coverage,
        "draft/validation_overlap": next(value for name, value in found.items() if name.endswith("/overlap")),
        "draft/ratio_estimated": found[CHOICE],
        "draft/step_estimated": expected.costs.drafting(1),
    }
    details = {
        "shape": asdict(expected.draft),
        "break_even_estimated": expected.break_even,
        "best_step": best["global_step"],
        "precision": str(_precision(context)),
        "vocabulary_coverage": coverage,
        "validation": found,
        **scores,
    }
    return scores, details


def _seed(context: Context) -> int:
    """The seed of the batch order: ``trainer.seed``, which shapes nothing that is shared, or that of the run."""
    own = context.config.trainer.seed
    return context.config.seed if own is None else own


def _precision(context: Context) -> torch.dtype:
    return dtype_of(context.config.trainer.precision, context.work)
