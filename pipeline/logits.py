"""Stage logits: one teacher pass over the responses, compressed, at the positions that predict response tokens only.

Training text and validation text (at each temperature) lie in folders of their own; validation keeps more of each
distribution, because overlap is estimated from it.
"""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from data.logit_cache import bytes_per_position, compress, write_shard
from data.responses import Response, read_shards
from pipeline import trainer
from pipeline.config import Stage
from pipeline.context import Context
from pipeline.errors import PipelineError
from pipeline.tracking import Run

FORMAT = 1
SPARE_BYTES = 1 << 28  # room that must stay free beside the cache


def identity(context: Context) -> dict[str, Any]:
    return {"target": context.target.fingerprint, "precision": str(context.dtype), "codec": asdict(context.config.codec)}


def run(context: Context, folder: Path, child: Run) -> tuple[dict[str, float], dict[str, Any]]:
    config = context.config.codec
    responses = [r for r in read_shards(context.parent(Stage.generate).folder) if r.tokens]
    groups = {"train": ([r for r in responses if r.request.split == "train"], config.top_k)}
    for temperature in context.config.generate.temperatures:
        chosen = [r for r in responses if r.request.split == "validation" and r.request.temperature == temperature]
        groups[validation_name(temperature)] = (chosen, config.evaluation_top_k)
    model = context.target.load(context.dtype)
    vocabulary = model.config.vocab_size
    estimate = sum(
        bytes_per_position(k, vocabulary) * sum(len(r.tokens) for r in rows) + 4 * sum(r.length for r in rows)
        for rows, k in groups.values()
    )
    _check_disk(folder, estimate)
    work = [
        (folder / name / f"shard-{number:05d}.safetensors", batch, k)
        for name, (rows, k) in groups.items()
        for number, batch in enumerate(_batches(rows, config.batch_size))
    ]
    waiting = [item for item in work if not item[0].is_file()]
    if waiting:
        runner = trainer.make(context.config.trainer, folder)
        loader = DataLoader(waiting, batch_size=None, collate_fn=lambda item: item)
        with trainer.interruptible(runner):
            runner.predict(_Teacher(model), loader, return_predictions=False)
    size = sum(path.stat().st_size for path, _, _ in work)
    positions = sum(len(r.tokens) for rows, _ in groups.values() for r in rows)
    details = {
        "positions": positions,
        "bytes": size,
        "bytes_estimated": estimate,
        "bytes_per_position": size / max(positions, 1),
        "rows": {name: len(rows) for name, (rows, _) in groups.items()},
    }
    return {"logits/bytes_per_position": details["bytes_per_position"], "logits/positions": positions}, details


def validation_name(temperature: float) -> str:
    """Folder of the cache of validation text written at ``temperature``."""
    return f"validation-{temperature:g}"


def _batches(rows: list[Response], size: int) -> list[list[Response]]:
    ordered = sorted(rows, key=lambda r: (-r.length, r.request.key))
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


def _check_disk(folder: Path, estimate: int) -> None:
    free = shutil.disk_usage(folder).free
    if estimate + SPARE_BYTES > free:
        raise PipelineError(
            f"paths.work: the logits cache needs about {estimate / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; "
            "lower codec.top_k or corpus.train, or set paths.work to a larger disk"
        )


class _Teacher(L.LightningModule):
    """One batch of responses in, one shard of compressed distributions out."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def predict_step(self, item: tuple[Path, list[Response], int]) -> int:
        path, batch, k = item
        width = max(response.length for response in batch)
        tokens = torch.zeros(len(batch), width, dtype=torch.long)
        for place, response in enumerate(batch):
            tokens[place, : response.length] = torch.tensor(response.request.prompt + response.tokens)
        # Right padding comes after everything a causal model sees at a kept position; the head runs where it is needed.
        first = min(len(response.request.prompt) for response in batch) - 1
        keep = torch.arange(first, width - 1)
        logits = self.model(input_ids=tokens.to(self.device), logits_to_keep=keep.to(self.device), use_cache=False).logits
        parts = []
        for row, response in zip(logits, batch, strict=True):
            start = len(response.request.prompt) - 1 - first
            parts.append(compress(row[start : start + len(response.tokens)], k))
        targets = {name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0]}
        rows = [([*r.request.prompt, *r.tokens], len(r.request.prompt)) for r in batch]
        write_shard(path, rows, targets)
        return len(rows)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch
