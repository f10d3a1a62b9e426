"""One epoch of distillation from the cache against TRL's GKD trainer: the same pair, texts, batch, number format and loss.

    python -m tests.bench.training [--target FOLDER] [--rows 64] [--tokens 64] [--batch 16] [--trl FOLDER]

Each side runs in a process of its own, so that peak memory is its own. TRL asks the target again at every step, on text
that is given (lambda 0, beta 0: forward KL). It is installed into a scratch folder and nowhere else; ``--trl`` names one
that has it. The first step of each side is a warm-up and does not count.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from data import standard_library
from data.batching import LengthGroupedBatches, collate
from data.logit_cache import LogitCache
from data.shards import Seal
from data.topk import TopK
from pipeline.choices import Method
from pipeline.config import Draft as DraftConfig
from pipeline.config import Objective, Optimizer
from pipeline.draft import build
from pipeline.hardware import machine
from pipeline.module import Distillation
from pipeline.outlook import foresee
from pipeline.requests import prompt_ids
from pipeline.teacher import Teacher, Work
from speculative import Draft
from tests.bench import subject, text

TRL = "trl==1.16.0"
RATE = 1e-3
PHASES = ("load", "forward", "loss", "backward", "optimizer")


class Stopwatch(Callback):
    """Seconds of each phase of Lightning's steps, the first step left out."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.tokens, self._steps, self._mark = 0, 0, time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        if self._steps > 0:
            self.seconds[phase] += now - self._mark
        self._mark = now

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        self.lap("load")
        self.tokens += int(batch.predicts.sum()) if self._steps > 0 else 0

    def on_before_backward(self, trainer: L.Trainer, module: L.LightningModule, loss: torch.Tensor) -> None:
        self.lap("loss")

    def on_after_backward(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.lap("backward")

    def on_train_batch_end(self, *given: Any) -> None:
        self.lap("optimizer")
        self._steps += 1


class Timed(Distillation):
    """Distillation that says when its forward pass is over."""

    watch: Stopwatch

    def log_q(self, batch: Any) -> torch.Tensor:
        found = super().log_q(batch)
        self.watch.lap("forward")
        return found


def ours(folder: Path, batch: int, dtype: torch.dtype) -> dict[str, Any]:
    """Seconds by phase and tokens of an epoch from the cache; the target is not loaded."""
    rows = LogitCache(folder / "train", "bench")
    draft = Draft(AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.float32))
    config = Optimizer(method=Method.adamw, learning_rate=RATE)
    steps = -(-len(rows) // batch)
    costs = foresee(draft, draft.model, dtype).costs
    module = Timed(draft, draft.model.config.vocab_size, Objective(), config, steps, {}, costs)
    module.watch = Stopwatch()
    module.model.train()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, callbacks=[module.watch], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0, default_root_dir=folder,
        precision="bf16-mixed" if dtype is torch.bfloat16 else "32-true",
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows, batch_sampler=LengthGroupedBatches(rows.lengths, batch, steps, 0), collate_fn=collate))
    return {"split": module.watch.seconds, "seconds": sum(module.watch.seconds.values()), "tokens": module.watch.tokens}


def theirs(folder: Path, batch: int, dtype: torch.dtype) -> dict[str, Any]:
    """Seconds and tokens of an epoch of TRL's trainer on the same texts."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    counted: list[int] = []
    ends: list[float] = []

    def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = max(len(row["tokens"]) for row in rows)
        ids, labels = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), -100)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            length, tokens = len(row["tokens"]), torch.tensor(row["tokens"])
            ids[place, :length], mask[place, :length] = tokens, 1
            labels[place, row["start"] : length] = tokens[row["start"] :]
        counted.append(int((labels != -100).sum()))
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    class Ends(TrainerCallback):
        def on_step_end(self, *given: Any, **options: Any) -> None:
            ends.append(time.perf_counter())

    low = dtype is torch.bfloat16
    config = GKDConfig(
        output_dir=str(folder / "out"), per_device_train_batch_size=batch, num_train_epochs=1, learning_rate=RATE, lmbda=0.0,
        beta=0.0, temperature=1.0, bf16=low, use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no",
        disable_tqdm=True, gradient_checkpointing=False, max_grad_norm=1.0, seed=0,
    )  # fmt: skip
    target = json.loads((folder / "pair.json").read_text())["target"]
    trainer = GKDTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.float32),
        teacher_model=AutoModelForCausalLM.from_pretrained(target, dtype=dtype),
        args=config,
        data_collator=pad,
        train_dataset=Dataset.from_list(json.loads((folder / "rows.json").read_text())),
        processing_class=AutoTokenizer.from_pretrained(target),
        callbacks=[Ends()],
    )
    trainer.train()
    return {"seconds": ends[-1] - ends[0], "tokens": sum(counted[1:])}


def prepare(options: Any, folder: Path) -> torch.dtype:
    """Write texts of the target, their cache and the draft into ``folder``; gives the number format."""
    files, dtype = subject.chosen(options)
    model, tokenizer = files.load(dtype), files.tokenizer()
    texts, _ = standard_library.read()
    prompts = [prompt_ids(tokenizer, prompt.text, None)[-256:] for prompt in texts[: options.rows]]
    text.write(model, prompts, options.rows * options.tokens, options.tokens, folder / "text")
    rows = text.read(folder / "text", options.rows * options.tokens)
    seal = Seal("bench", "train", 0, 1, TopK(128), model.config.vocab_size)
    (folder / "train").mkdir()
    Teacher(model).predict_step(Work(folder / "train", seal, rows))
    given = [{"tokens": [*r.request.prompt, *r.tokens], "start": len(r.request.prompt)} for r in rows]
    (folder / "rows.json").write_text(json.dumps(given))
    (folder / "pair.json").write_text(json.dumps({"target": str(files.folder)}))
    build(model, DraftConfig(layers=[0, 1]), None).model.save_pretrained(folder / "draft")
    return dtype


def install(folder: Path) -> Path:
    """TRL without its dependencies, which are ours already, in a folder of its own."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), TRL]
    subprocess.run(command, check=True)
    return folder


def measure(side: str, folder: Path, batch: int, dtype: torch.dtype, extra: Path | None = None) -> dict[str, Any]:
    """Run one side in a process of its own; gives what it measured and its peak memory in MB."""
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join([root, *([str(extra)] if extra else [])])
    command = [sys.executable, "-m", "tests.bench.training", "--side", side, "--folder", str(folder), "--batch", str(batch)]
    done = subprocess.run(
        [*command, "--dtype", str(dtype).removeprefix("torch.")], cwd=root, env=os.environ | {"PYTHONPATH": paths},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{side} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def peak_mb() -> float:
    """Peak resident memory of this process; ``getrusage`` would hold that of the process which started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def main() -> None:
    parser = subject.parser(__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--trl", type=Path, default=None)
    parser.add_argument("--side", choices=("ours", "theirs"), help="used by the benchmark itself")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    if options.side:
        side = ours if options.side == "ours" else theirs
        found = side(options.folder, options.batch, getattr(torch, options.dtype))
        print(json.dumps(found | {"memory_mb": peak_mb()}))
        return
    with tempfile.TemporaryDirectory(dir=options.work) as scratch:
        folder = Path(scratch)
        dtype = prepare(options, folder)
        mine = measure("ours", folder, options.batch, dtype)
        other = measure("theirs", folder, options.batch, dtype, options.trl or install(folder / "trl"))
    table = Table("", "tokens/s", "peak MB", title=f"One epoch of distillation, {options.rows} texts, {machine()['cpu']}")
    speed = {name: one["tokens"] / one["seconds"] for name, one in (("ours", mine), ("TRL GKD", other))}
    for name, one in (("ours", mine), ("TRL GKD", other)):
        table.add_row(name, f"{speed[name]:.0f}", f"{one['memory_mb']:.0f}")
    Console(width=110).print(table)
    shares = {f"{phase}_share": seconds / mine["seconds"] for phase, seconds in mine["split"].items()}
    ratios = {
        "tokens_per_s_vs_trl": speed["ours"] / speed["TRL GKD"],
        "memory_vs_trl": mine["memory_mb"] / other["memory_mb"],
    }
    print(json.dumps(ratios | shares | {"environment": machine()}))


if __name__ == "__main__":
    main()
