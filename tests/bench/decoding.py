"""The engine against transformers on real prompts: plain, speculative, batched, automatic K; ratios of interleaved runs.

    python -m tests.bench.decoding [--target FOLDER] [--draft FOLDER] [--prompts FILE.jsonl] [--count 4] [--tokens 48]

``--draft`` is the ``draft`` folder of a distil stage. Without it two layers of the target with a fitted head stand in, which
shows costs and not what distillation reaches. Prompts of the standard library are one set; each ``--prompts``, JSON lines
with ``turns`` or ``prompt``, is another. Ratios are times of the other ÷ ours, medians over prompts; ours runs on packed
weights but for ``plain_b1_eager``. There is no compiled path: ``plain_b1_compiled`` is null, ``plain_b1_packed`` is what
stands in its place. Automatic K is judged on sums over a prompt set, with the draft and with one that is never right, each
learning from prompt to prompt. What bounds a plain step is printed beside it: bytes of weights ÷ memory bandwidth.
"""

import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

import speculative
from data import standard_library
from pipeline import baselines
from pipeline import draft as drafts
from pipeline.expand import expand
from pipeline.generate import prompt_ids
from pipeline.hardware import machine
from speculative import AutoLength, Costs, Draft, Generation, Sampling, pack
from speculative.calibration import measure
from speculative.metrics import total
from tests.bench import stand_in, subject
from tests.bench.generation import theirs

GREEDY, NUCLEUS = Sampling(0.0), Sampling(1.0, top_p=0.9)
LONGEST = 4
OPENVINO = 2.1  # its recorded plain rate ÷ that of transformers' generate, fp16, on cores with bfloat16
Run = Callable[[list[int]], tuple[float, Generation | None]]


@dataclass(frozen=True)
class Bench:
    """What is compared on what; ``assistant`` is the draft as transformers takes it, ``useless`` one that is never right."""

    target: PreTrainedModel
    packed: PreTrainedModel
    draft: Draft
    useless: Draft
    assistant: PreTrainedModel
    tokens: int
    drafted: int

    def ours(
        self, prompts: list[list[int]], draft: Draft | None, length: int | AutoLength, sampling: Sampling = GREEDY, eager=False
    ) -> tuple[float, Generation]:
        started = time.perf_counter()
        options = {"max_new_tokens": self.tokens, "num_draft_tokens": length, "sampling": sampling}
        done = speculative.generate(self.target if eager else self.packed, draft, prompts, **options)
        return time.perf_counter() - started, done

    def transformers(self, prompt: list[int], sampling: Sampling = GREEDY, assisted: bool = False) -> tuple[float, None]:
        assistant = self.assistant if assisted else None
        return baselines.decode(self.target, prompt, self.tokens, sampling, 0, assistant, self.drafted).seconds, None

    def ways(self, costs: Costs) -> dict[str, Run]:
        """Every way of decoding one prompt, by name."""
        learning, wary = AutoLength(costs), AutoLength(costs)
        fixed = {f"K={k}": lambda p, k=k: self.ours([p], self.draft, k) for k in range(1, LONGEST + 1)}
        return fixed | {
            "theirs": self.transformers,
            "theirs assisted": lambda p: self.transformers(p, assisted=True),
            "theirs assisted, sampled": lambda p: self.transformers(p, NUCLEUS, assisted=True),
            "eager": lambda p: self.ours([p], None, 0, eager=True),
            "plain": lambda p: self.ours([p], None, 0),
            "sampled": lambda p: self.ours([p], self.draft, self.drafted, NUCLEUS),
            "automatic": lambda p: self.ours([p], self.draft, learning),
            "automatic, useless draft": lambda p: self.ours([p], self.useless, wary),
        }


def race(bench: Bench, costs: Costs, prompts: list[list[int]]) -> list[dict[str, tuple[float, Generation | None]]]:
    """Seconds and result of every way, prompt by prompt, in an order that alternates; the first prompt warms up."""
    ways = bench.ways(costs)
    rows = []
    for number, prompt in enumerate(prompts):
        order = list(ways) if number % 2 else list(reversed(ways))
        rows.append({name: ways[name](prompt) for name in order})
    return rows[1:]


def one_at_a_time(bench: Bench, costs: Costs, sets: dict[str, list[dict]]) -> dict[str, float]:
    """The figures of batch 1, from the races over the prompt ``sets``."""
    rows = [row for rows in sets.values() for row in rows]
    fast = f"K={bench.drafted}"

    def ratio(above: str, below: str) -> float:
        return median(row[above][0] / row[below][0] for row in rows)

    def sums(rows: list[dict]) -> dict[str, float]:
        return {name: sum(row[name][0] for row in rows) for name in rows[0]}

    totals = [sums(rows) for rows in sets.values()]
    fixed = [min(t["plain"], *(t[f"K={k}"] for k in range(1, LONGEST + 1))) for t in totals]
    results = [row[fast][1] for row in rows]
    counts = total(part for done in results for part in done.acceptance)
    errors = []
    for row in rows:
        plain, done = row["plain"][1], row[fast][1]
        predicted = total(done.acceptance).tokens_per_round / costs.round(bench.drafted)
        errors.append(plain.seconds.decoding / done.seconds.decoding / predicted - 1)
    return {
        "plain_b1_eager": ratio("theirs", "eager"),
        "plain_b1_packed": ratio("theirs", "plain"),
        "assisted_b1_greedy": ratio("theirs assisted", fast),
        "assisted_b1_sampled": ratio("theirs assisted, sampled", "sampled"),
        "speculative_ratio": ratio("plain", fast),
        "of_openvino_recorded": ratio("theirs", fast) / OPENVINO,
        "tokens_per_round": counts.tokens_per_round,
        "bookkeeping_share": sum(done.seconds.other for done in results) / sum(done.seconds.decoding for done in results),
        "auto_k_worst_ratio": min(t["plain"] / t[name] for t in totals for name in t if name.startswith("automatic")),
        "auto_k_of_best_fixed": min(best / t["automatic"] for best, t in zip(fixed, totals, strict=True)),
        "prediction_error": median(errors),
    }


def in_batches(bench: Bench, prompts: list[list[int]]) -> dict[str, float]:
    """Batch 32 plain against transformers, batch 8 speculative against plain here; the first repeat warms up."""

    def fill(size: int) -> list[list[int]]:
        return sorted((prompts[i % len(prompts)] for i in range(size)), key=len)

    found: dict[str, list[float]] = {"plain_b32": [], "batch8_ratio": []}
    for repeat in range(3):
        wide = theirs(bench.target, fill(32), bench.tokens) / bench.ours(fill(32), None, 0, Sampling(1.0))[0]
        eight = bench.ours(fill(8), None, 0)[0] / bench.ours(fill(8), bench.draft, bench.drafted)[0]
        if repeat > 0:
            found["plain_b32"].append(wide)
            found["batch8_ratio"].append(eight)
    return {name: median(values) for name, values in found.items()}


def bound(target: PreTrainedModel, costs: Costs) -> dict[str, float]:
    """A plain step, and the least it could take: its weights, read once at the rate at which memory can be read."""
    lookup, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    read = sum(weight.nbytes for weight in target.parameters()) - (0 if lookup is head else lookup.nbytes)
    block, seconds = torch.ones(1 << 26), []  # 256 MiB: no processor's cache holds it
    for _ in range(5):
        started = time.perf_counter()
        block.sum()
        seconds.append(time.perf_counter() - started)
    bandwidth = block.nbytes / min(seconds)
    return {"plain_step_ms": 1e3 * costs.plain_seconds, "floor_ms": 1e3 * read / bandwidth, "bandwidth_gb_s": bandwidth / 1e9}


def never_right(draft: Draft) -> Draft:
    """A draft of the same shape and cost with a head of noise."""
    model = copy.deepcopy(draft.model)
    with torch.no_grad():
        torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.02)
    return Draft(model, draft.vocabulary)


def read_prompts(path: Path | None, count: int) -> list[str]:
    """``count`` texts spread over the file, or over the standard library."""
    if path is None:
        texts = [prompt.text for prompt in standard_library.read()[0]]
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        texts = [row["turns"][0] if "turns" in row else row["prompt"] for row in rows]
    return texts[:: max(1, len(texts) // count)][:count]


def main() -> None:
    parser = subject.parser(__doc__)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--prompts", type=Path, action="append", default=[])
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--drafted", type=int, default=2, choices=range(1, LONGEST + 1))
    options = parser.parse_args()
    files, dtype = subject.chosen(options)
    tokenizer = files.tokenizer()
    sets = {
        "standard library" if path is None else path.stem: [
            prompt_ids(tokenizer, text, None)[-256:] for text in read_prompts(path, options.count)
        ]
        for path in (None, *options.prompts)
    }
    prompts = [prompt for rows in sets.values() for prompt in rows]
    target = files.load(dtype)
    if options.draft is None:
        whole = stand_in.fitted(files.load(torch.float32), prompts[: max(2, len(prompts) // 2)])
    else:
        whole = drafts.load(options.draft, torch.float32)
    assistant = expand(whole, prompts, target.config.vocab_size).model.to(dtype)
    draft, useless = (Draft(pack(copy.deepcopy(one.model).to(dtype)), one.vocabulary) for one in (whole, never_right(whole)))
    bench = Bench(target, pack(files.load(dtype)), draft, useless, assistant, options.tokens, options.drafted)
    *_, costs = measure(bench.packed, bench.draft, prompts[:4], GREEDY, longest=LONGEST)
    races = {name: race(bench, costs, rows) for name, rows in sets.items()}
    figures = one_at_a_time(bench, costs, races) | in_batches(bench, prompts) | bound(target, costs)
    measured = sum(map(len, races.values()))
    table = Table("", "", title=f"{measured} prompts, {options.tokens} new tokens, K = {options.drafted}, {dtype}")
    for name, value in figures.items():
        table.add_row(name, f"{value:.3f}")
    Console().print(table)
    print(json.dumps({**figures, "plain_b1_compiled": None, "environment": machine()}))


if __name__ == "__main__":
    main()
