"""The logit cache on a target's own text: bytes, error of the estimated overlap, cost of writing and reading.

    python -m tests.bench.cache [--target FOLDER] [--positions 20000] [--tokens 64] [--synthetic 2000000]

Without ``--target``, the model of ``make run`` is used. The draft whose overlap is estimated is the target with noise on its
logits. Drafts distilled from each codec are compared by the pipeline itself (``codec=...``), not here.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

import speculative
from data import standard_library
from data.batching import collate
from data.codec import Codec
from data.fidelity import measures, noisy, summary
from data.hidden import Hidden
from data.logit_cache import LogitCache
from data.responses import Request, Response
from data.shards import Seal, write_shard
from data.topk import TopK
from pipeline.config import Draft as DraftConfig
from pipeline.config import Objective, Optimizer
from pipeline.draft import build
from pipeline.generate import prompt_ids
from pipeline.hardware import machine
from pipeline.module import Distillation
from pipeline.outlook import foresee
from pipeline.teacher import Teacher, Work, decoded, forward
from tests.bench import subject

CODECS: dict[str, Codec] = {
    "topk": TopK(128),
    "topk, 24 + 12 drawn": TopK(24, 12),
    "small: topk, 8 + 4 drawn": TopK(8, 4),
    "hidden, 16 bits": Hidden(16),
    "hidden, 8 bits": Hidden(8),
}
BATCH = 16


def responses(model: PreTrainedModel, prompts: list[list[int]], positions: int, tokens: int) -> list[Response]:
    """Text of the target at temperature 1 until it has ``positions`` tokens."""
    made: list[Response] = []
    for first in range(0, len(prompts), BATCH):
        batch = prompts[first : first + BATCH]
        done = speculative.generate(model, None, batch, max_new_tokens=tokens, sampling=speculative.Sampling(1.0))
        for place, (prompt, answer) in enumerate(zip(batch, done.tokens, strict=True)):
            request = Request(first + place, "train", str(first + place), "bench", 1.0, tuple(prompt))
            made.append(Response(request, tuple(answer), False))
        if sum(len(r.tokens) for r in made) >= positions:
            break
    return [r for r in made if r.tokens]


@torch.inference_mode()
def fidelities(model: PreTrainedModel, sample: list[Response]) -> dict[str, dict[str, float]]:
    """KL, overlap error and interval of every codec, and of the renormalised top k as the bad example."""
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in CODECS}
    renormalised, dense = 0.0, 0.0
    for response in sample:
        log_p = forward(model, [response], False)[0].float().log_softmax(-1).cpu()
        states = forward(model, [response], True)[0].cpu()
        log_q = noisy(log_p, 1.0, response.request.key)
        for name, codec in CODECS.items():
            given = states if isinstance(codec, Hidden) else log_p
            parts[name].append(measures(log_p, decoded(codec, codec.encode(given, response.request.key), model), log_q))
        # A draft that learnt the renormalised top k to perfection overlaps with p by the mass of the top k.
        renormalised += float(log_p.topk(min(128, log_p.shape[1])).values.exp().sum())
        dense += len(log_p)
    found = {name: vars(summary(torch.cat(rows))) for name, rows in parts.items()}
    return found | {"topk 128, renormalised": {"cap": renormalised / dense}}


def write(model: PreTrainedModel, rows: list[Response], codec: Codec, folder: Path) -> tuple[float, float, float]:
    """Bytes per token of a cache of ``rows``, seconds to write it, seconds of its bare forward passes."""
    batches = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
    teacher, bare, whole = Teacher(model), 0.0, 0.0
    with torch.inference_mode():
        for number, batch in enumerate(batches):
            began = time.perf_counter()
            forward(model, batch, isinstance(codec, Hidden))
            bare += time.perf_counter() - began
            began = time.perf_counter()
            teacher.predict_step(
                Work(folder, Seal("bench", folder.name, number, len(batches), codec, model.config.vocab_size), batch)
            )
            whole += time.perf_counter() - began
    size = sum(path.stat().st_size for path in folder.iterdir())
    return size / sum(len(r.tokens) for r in rows), whole, bare


def read_over_consume(model: PreTrainedModel, folder: Path) -> float:
    """Tokens a second that the reader gives ÷ tokens a second that one distillation step takes."""
    cache = LogitCache(folder, "bench")
    picks = list(range(min(BATCH, len(cache))))
    cache[0]
    began = time.perf_counter()
    batch = collate([cache[i] for i in picks])
    reading = time.perf_counter() - began
    draft = build(model.float(), DraftConfig(layers=[0]), None)
    learner = Distillation(
        draft, model.config.vocab_size, Objective(), Optimizer(), 1, {}, foresee(draft, model, model.dtype).costs
    )
    learner.log = lambda *given, **options: None
    began = time.perf_counter()
    learner.training_step(batch, 0).backward()
    return (time.perf_counter() - began) / reading


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


def main() -> None:
    parser = subject.parser(__doc__)
    parser.add_argument("--positions", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--synthetic", type=int, default=2_000_000)
    options = parser.parse_args()
    files, dtype = subject.chosen(options)
    model, tokenizer = files.load(dtype), files.tokenizer()
    texts, _ = standard_library.read()
    prompts = list(_prompts(tokenizer, [text.text for text in texts], options.positions, options.tokens))
    rows = responses(model, prompts, options.positions, options.tokens)
    found = fidelities(model, rows)
    table = Table(title=f"The logit cache of {files.name}, {sum(len(r.tokens) for r in rows)} positions, {machine()['cpu']}")
    for heading in ("codec", "bytes/token", "KL", "overlap error ± SE", "interval", "forward ÷ write"):
        table.add_column(heading)
    result, share, ratio = {}, {}, 0.0
    with tempfile.TemporaryDirectory(dir=options.work) as scratch:
        for place, (name, codec) in enumerate(CODECS.items()):
            result[name], whole, bare = write(model, rows, codec, Path(scratch) / f"codec-{place}")
            share[name] = bare / whole
            f = found[name]
            table.add_row(name, f"{result[name]:.1f}", f"{f['kl']:.2g}",
                          f"{f['overlap_bias']:+.4f} ± {f['overlap_standard_error']:.4f}",
                          f"{f['overlap_lower']:.3f} … {f['overlap_upper']:.3f}", f"{share[name]:.3f}")  # fmt: skip
        table.add_row(
            "topk 128, renormalised", "", "", "", f"a draft cannot pass {found['topk 128, renormalised']['cap']:.4f}", ""
        )
        ratio = read_over_consume(model, Path(scratch) / "codec-0")
        growth = reader_rss_growth_mb(Path(scratch), max(1000, options.synthetic // 20), options.synthetic)
    Console(width=140).print(table)
    line = {
        "topk_bytes_per_token": result["topk"],
        "topk_overlap_error": abs(found["topk"]["overlap_bias"]),
        "small_bytes_per_token": result["small: topk, 8 + 4 drawn"],
        "small_overlap_error": abs(found["small: topk, 8 + 4 drawn"]["overlap_bias"]),
        "hidden_bytes_per_token": result["hidden, 8 bits"],
        "hidden_kl": found["hidden, 8 bits"]["kl"],
        "write_share_of_forward": share["topk"],
        "read_over_consume": ratio,
        "reader_rss_growth_mb": growth,
    }
    print(json.dumps(line))


def _prompts(tokenizer, texts: list[str], positions: int, tokens: int) -> Iterator[list[int]]:
    """As many prompts as may be needed, since an answer can end early."""
    for text in texts[:: max(1, len(texts) * tokens // (4 * positions))]:
        yield prompt_ids(tokenizer, text, None)[-256:]


if __name__ == "__main__":
    main()
