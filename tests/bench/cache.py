"""The logit cache on a target's own text: bytes, error of the estimated overlap, drafts learnt from it, writing, reading.

    python -m tests.bench.cache [--target FOLDER] [--positions 20000] [--tokens 64] [--steps 60] [--synthetic 2000000]

Without ``--target``, the model of ``make run`` is used. The draft whose overlap is estimated is the target with noise on its
logits. Drafts are distilled from three codecs and from dense targets with the same seed and steps, and compared on an eighth
of the text that none of them saw. Times are of batches taken in turns.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import PreTrainedModel

import speculative
from data import standard_library
from data.batching import collate
from data.codec import Codec
from data.dense import Dense
from data.fidelity import measures, noisy, summary
from data.hidden import Hidden
from data.logit_cache import LogitCache, write_head
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
from pipeline.teacher import Teacher, Work, decoded, forward, head_of
from tests.bench import learnt, subject

CODECS: dict[str, Codec] = {
    "topk": TopK(32, 14, bits=8),
    "small: topk, 8 + 6 drawn": TopK(8, 6, bits=8),
    "topk, nothing drawn, 16 bits": TopK(128),
    "hidden, 8 bits": Hidden(8),
    "hidden, 16 bits": Hidden(16),
    "dense": Dense(),
}
RENORMALISED = 32  # ids of the bad example, which forgets the tail
LEARNT = ("dense", "topk", "small: topk, 8 + 6 drawn", "hidden, 8 bits")
BATCH = 16
TIMED = 8  # batches


def responses(model: PreTrainedModel, prompts: list[list[int]], positions: int, tokens: int) -> list[Response]:
    """Text of the target at temperature 1 until it has ``positions`` tokens."""
    made: list[Response] = []
    for first in track(range(0, len(prompts), 4 * BATCH), description="the target answers", transient=True):
        batch = prompts[first : first + 4 * BATCH]
        done = speculative.generate(model, None, batch, max_new_tokens=tokens, sampling=speculative.Sampling(1.0))
        for place, (prompt, answer) in enumerate(zip(batch, done.tokens, strict=True)):
            request = Request(first + place, "train", str(first + place), "bench", 1.0, tuple(prompt))
            made.append(Response(request, tuple(answer), False))
        if sum(len(r.tokens) for r in made) >= positions:
            break
    return [r for r in made if r.tokens]


@torch.inference_mode()
def write_all(model: PreTrainedModel, rows: list[Response], root: Path) -> dict[str, dict[str, float]]:
    """A cache of ``rows`` by every codec from one teacher pass; gives bytes per token, and fidelity on these rows."""
    batches = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
    measured: dict[str, list[torch.Tensor]] = {name: [] for name in CODECS}
    mass: list[torch.Tensor] = []
    write_head(root, "bench", *head_of(model))
    for number, batch in enumerate(track(batches, description="every codec writes", transient=True)):
        states = [row.cpu() for row in forward(model, batch, True)]
        log_p = [model.get_output_embeddings()(row).float().log_softmax(-1) for row in states]
        mass += [row.topk(min(RENORMALISED, row.shape[1])).values.exp().sum(-1) for row in log_p]
        tokens = [([*r.request.prompt, *r.tokens], len(r.request.prompt)) for r in batch]
        for place, (name, codec) in enumerate(CODECS.items()):
            given = states if isinstance(codec, Hidden) else log_p
            parts = [codec.encode(row, r.request.key) for row, r in zip(given, batch, strict=True)]
            stored = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
            write_shard(root / f"{place}", tokens, stored,
                        Seal("bench", f"{place}", number, len(batches), codec, model.config.vocab_size))  # fmt: skip
            for part, row, response in zip(parts, log_p, batch, strict=True):
                log_q = noisy(row, 1.0, response.request.key)
                measured[name].append(measures(row, decoded(codec, part, model), log_q))
    count = sum(len(r.tokens) for r in rows)
    found = {name: dict(vars(summary(torch.cat(parts)))) for name, parts in measured.items()}
    for place, name in enumerate(CODECS):
        found[name]["bytes"] = sum(path.stat().st_size for path in (root / f"{place}").iterdir()) / count
    return found | {"renormalised": {"cap": float(torch.cat(mass).mean())}}


@torch.inference_mode()
def forward_share_of_writing(model: PreTrainedModel, rows: list[Response], codec: Codec, folder: Path) -> float:
    """Seconds of the bare forward pass ÷ seconds of a shard written, the median over batches; the first one warms up."""
    teacher, shares = Teacher(model), []
    batches = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)][: TIMED + 1]
    for number, batch in enumerate(batches):
        began = time.perf_counter()
        forward(model, batch, isinstance(codec, Hidden))
        between = time.perf_counter()
        seal = Seal("bench", folder.name, number, len(batches), codec, model.config.vocab_size)
        teacher.predict_step(Work(folder, seal, batch))
        shares.append((between - began) / (time.perf_counter() - between))
    return statistics.median(shares[1:] or shares)


def read_over_consume(model: PreTrainedModel, folder: Path) -> float:
    """Seconds that one distillation step takes ÷ seconds that the reader needs for its batch, the median over batches."""
    cache = LogitCache(folder, "bench")
    draft = build(model, DraftConfig(layers=[0, 1]), None)
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


def main() -> None:
    parser = subject.parser(__doc__)
    parser.add_argument("--positions", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60, help="of each distillation")
    parser.add_argument("--vocabulary", type=int, default=8192, help="of the drafts")
    parser.add_argument("--synthetic", type=int, default=2_000_000, help="tokens that the reader's memory is measured on")
    options = parser.parse_args()
    files, dtype = subject.chosen(options)
    model, tokenizer = files.load(dtype), files.tokenizer()
    texts, _ = standard_library.read()
    prompts = list(_prompts(tokenizer, [text.text for text in texts], options.positions, options.tokens))
    rows = responses(model, prompts, options.positions, options.tokens)
    seen, others = rows[len(rows) // 8 :], rows[: len(rows) // 8]
    with tempfile.TemporaryDirectory(dir=options.work) as scratch:
        root = Path(scratch)
        found = write_all(model, seen, root)
        share = {
            name: forward_share_of_writing(model, seen, CODECS[name], root / f"timed-{place}")
            for place, name in enumerate(("topk", "hidden, 8 bits"))
        }
        reading = read_over_consume(model.float(), root / "0")
        places = {name: root / f"{place}" for place, name in enumerate(CODECS)}
        overlaps = {
            name: learnt.overlap(model, LogitCache(places[name], "bench"), others, options.vocabulary, options.steps)
            for name in LEARNT
        }
        growth = reader_rss_growth_mb(root, max(1000, options.synthetic // 20), options.synthetic)
    positions = sum(len(r.tokens) for r in seen)
    Console(width=140).print(_table(f"The logit cache of {files.name}, {positions} positions, {dtype}", found, overlaps, share))
    small = "small: topk, 8 + 6 drawn"
    line = {
        "topk_bytes_per_token": found["topk"]["bytes"],
        "topk_overlap_error": abs(found["topk"]["overlap_bias"]),
        "topk_draft_overlap_loss": overlaps["dense"] - overlaps["topk"],
        "small_bytes_per_token": found[small]["bytes"],
        "small_overlap_error": abs(found[small]["overlap_bias"]),
        "small_draft_overlap_loss": overlaps["dense"] - overlaps[small],
        "hidden_bytes_per_token": found["hidden, 8 bits"]["bytes"],
        "hidden_kl": found["hidden, 8 bits"]["kl"],
        "hidden_draft_overlap_loss": overlaps["dense"] - overlaps["hidden, 8 bits"],
        "write_share_of_forward": share["topk"],
        "read_over_consume": reading,
        "reader_rss_growth_mb": growth,
        "positions": positions,
        "environment": machine(),
    }
    print(json.dumps(line))


def _table(title: str, found: dict, overlaps: dict[str, float], share: dict[str, float]) -> Table:
    table = Table(title=title)
    for heading in ("codec", "bytes/token", "KL", "overlap error ± SE", "interval", "draft's overlap", "forward ÷ write"):
        table.add_column(heading)
    for name in CODECS:
        f = found[name]
        table.add_row(name, f"{f['bytes']:.1f}", f"{f['kl']:.2g}",
                      f"{f['overlap_bias']:+.4f} ± {f['overlap_standard_error']:.4f}",
                      f"{f['overlap_lower']:.3f} … {f['overlap_upper']:.3f}",
                      f"{overlaps[name]:.4f}" if name in overlaps else "",
                      f"{share[name]:.3f}" if name in share else "")  # fmt: skip
    cap = f"cannot pass {found['renormalised']['cap']:.3f}"
    table.add_row(f"top {RENORMALISED}, renormalised: the bad example", "", "", "", "", cap, "")
    return table


def _prompts(tokenizer, texts: list[str], positions: int, tokens: int) -> Iterator[list[int]]:
    """As many prompts as may be needed, since an answer can end early."""
    for text in texts[:: max(1, len(texts) * tokens // (4 * positions))]:
        yield prompt_ids(tokenizer, text, None)[-256:]


if __name__ == "__main__":
    main()
