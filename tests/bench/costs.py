"""What the logit cache costs in time and memory: a part of its benchmark. Times are of batches taken in turns."""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel

from data.batching import collate
from data.codec import Codec
from data.hidden import Hidden
from data.logit_cache import LogitCache
from data.responses import Response
from data.shards import Seal, write_shard
from data.topk import TopK
from pipeline.config import Objective, Optimizer
from pipeline.forward import forward
from pipeline.module import Distillation
from pipeline.outlook import foresee
from pipeline.teacher import Teacher, Work
from speculative import Draft

BATCH = 16
TIMED = 6  # batches


@torch.inference_mode()
def forward_share_of_writing(model: PreTrainedModel, rows: list[Response], codec: Codec, folder: Path) -> float:
    """Seconds of the bare forward pass ÷ seconds of a shard written, the median over batches; the first one warms up."""
    teacher, shares = Teacher(model), []
    ordered = sorted(rows[: BATCH * (TIMED + 1)], key=lambda r: -r.length)
    batches = [ordered[i : i + BATCH] for i in range(0, len(ordered), BATCH)]
    for number, batch in enumerate(batches):
        began = time.perf_counter()
        forward(model, batch, isinstance(codec, Hidden))
        between = time.perf_counter()
        seal = Seal("bench", folder.name, number, len(batches), codec, model.config.vocab_size)
        teacher.predict_step(Work(folder, seal, batch))
        shares.append((between - began) / (time.perf_counter() - between))
    return statistics.median(shares[1:] or shares)


def read_over_consume(model: PreTrainedModel, draft: Draft, cache: LogitCache) -> float:
    """Seconds that one distillation step takes ÷ seconds that the reader needs for its batch, the median over batches."""
    costs = foresee(draft, model, model.dtype).costs
    learner = Distillation(draft, model.config.vocab_size, Objective(), Optimizer(), 1, {}, costs)
    learner.log = lambda *given, **options: None
    ratios = []
    for first in range(0, min(len(cache), BATCH * TIMED), BATCH):
        picks = range(first, min(first + BATCH, len(cache)))
        cache[first]  # a shard's checksum is looked at once, not once an epoch
        began = time.perf_counter()
        batch = collate([cache[i] for i in picks])
        between = time.perf_counter()
        learner.training_step(batch, 0).backward()
        ratios.append((time.perf_counter() - between) / (between - began))
    return statistics.median(ratios)


READER = """
import sys
from pathlib import Path
from data.logit_cache import LogitCache
cache = LogitCache(Path(sys.argv[1]), "bench")
for index in range(len(cache)):
    cache[index]
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")))
"""


def reader_rss_growth_mb(root: Path, few: int, many: int) -> float:
    """Megabytes by which a reader of ``many`` synthetic tokens is larger in memory than one of ``few``."""
    codec, length = TopK(128), 1000
    stored = codec.encode(torch.randn(length, 2000, generator=torch.Generator().manual_seed(0)), 0)
    sizes = []
    for name, tokens in (("few", few), ("many", many)):
        count = max(1, tokens // length)
        for number in range(count):
            write_shard(root / name, [([1] * (length + 1), 1)], stored, Seal("bench", name, number, count, codec, 2000))
        done = subprocess.run(
            [sys.executable, "-c", READER, str(root / name)],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
        )
        sizes.append(int(done.stdout) / 1024)
    return sizes[1] - sizes[0]
