"""The engine against transformers on real prompts: plain, speculative, batched, automatic K; ratios of interleaved runs.

    python -m tests.bench.decoding [--target FOLDER] [--draft FOLDER --answers FOLDER] [--prompts FILE.jsonl] [--compile]

``--draft`` is the ``draft`` folder of a distil stage, ``--answers`` the result of the generate stage before it, whose test
prompts are one set. Without them two layers of the target with a fitted head stand in, which shows costs and not what
distillation reaches, and prompts of the standard library to which it was not fitted are that set. Each ``--prompts``, JSON
lines with ``turns`` or ``prompt``, is another. Ratios are times of the other ÷ ours, medians over prompts. transformers runs
as a user has it, and on our packed weights where a key ends in ``_on_packed``; ours is packed but for ``plain_b1_eager``.
Automatic K is judged on sums over a prompt set, with the draft and with one that is never right, each learning from prompt
to prompt. What bounds a plain step is printed beside it: bytes of weights ÷ memory bandwidth.
"""

import copy
import json
import sys
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
from pipeline import baselines
from pipeline import draft as drafts
from pipeline.expand import expand
from pipeline.hardware import machine
from speculative import AutoLength, Costs, Draft, Generation, Sampling, compiled, pack
from speculative.calibration import measure
from speculative.metrics import total
from tests.bench import prompts as prompts_of
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
    compiled: tuple[PreTrainedModel, Draft] | None
    draft: Draft
    useless: Draft
    assistant: PreTrainedModel
    tokens: int
    drafted: int

    def ours(
        self,
        prompts: list[list[int]],
        draft: Draft | None,
        length: int | AutoLength,
        sampling: Sampling = GREEDY,
        target: PreTrainedModel | None = None,
    ) -> tuple[float, Generation]:
        started = time.perf_counter()
        options = {"max_new_tokens": self.tokens, "num_draft_tokens": length, "sampling": sampling}
        done = speculative.generate(target or self.packed, draft, prompts, **options)
        return time.perf_counter() - started, done

    def transformers(
        self, prompt: list[int], sampling: Sampling = GREEDY, assisted: bool = False, packed: bool = False
    ) -> tuple[float, None]:
        assistant, target = self.assistant if assisted else None, self.packed if packed else self.target
        return baselines.decode(target, prompt, self.tokens, sampling, 0, assistant, self.drafted).seconds, None

    def ways(self, costs: Costs) -> dict[str, Run]:
        """Every way of decoding one prompt, by name."""
        learning, wary = AutoLength(costs), AutoLength(costs)
        fixed = {f"K={k}": lambda p, k=k: self.ours([p], self.draft, k) for k in range(1, LONGEST + 1)}
        if self.compiled is not None:
            target, draft = self.compiled
            fixed["compiled"] = lambda p: self.ours([p], None, 0, target=target)
            fixed["compiled, drafting"] = lambda p: self.ours([p], draft, self.drafted, target=target)
        return fixed | {
            "theirs": self.transformers,
            "theirs assisted": lambda p: self.transformers(p, assisted=True),
            "theirs assisted, sampled": lambda p: self.transformers(p, NUCLEUS, assisted=True),
            "theirs, packed": lambda p: self.transformers(p, packed=True),
            "theirs assisted, packed": lambda p: self.transformers(p, assisted=True, packed=True),
            "eager": lambda p: self.ours([p], None, 0, target=self.target),
            "plain": lambda p: self.ours([p], None, 0),
            "sampled": lambda p: self.ours([p], self.draft, self.drafted, NUCLEUS),
            "automatic": lambda p: self.ours([p], self.draft, learning),
            "automatic, useless draft": lambda p: self.ours([p], self.useless, wary),
        }


def race(bench: Bench, costs: Costs, prompts: list[list[int]]) -> list[dict[str, tuple[float, Generation | None]]]:
    """Seconds and result of every way, prompt by prompt, in an order that alternates; the first prompt warms up.

    What learns from prompt to prompt begins after that, so that its first mistakes are counted.
    """
    for run in bench.ways(costs).values():
        run(prompts[0])
    ways, rows = bench.ways(costs), []
    for number, prompt in enumerate(prompts[1:]):
        order = list(ways) if number % 2 else list(reversed(ways))
        rows.append({name: ways[name](prompt) for name in order})
    return rows


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
        errors.append(abs(plain.seconds.decoding / done.seconds.decoding / predicted - 1))
    found = {"plain_b1_compiled": None}
    if bench.compiled is not None:
        found = {
            "plain_b1_compiled": ratio("theirs", "compiled"),
            "compiled_over_packed": ratio("plain", "compiled"),
            "compiled_speculative_ratio": ratio("compiled", "compiled, drafting"),
            "compiled_speculative_over_packed": ratio(fast, "compiled, drafting"),
        }
    return found | {
        "plain_b1_eager": ratio("theirs", "eager"),
        "plain_b1_packed": ratio("theirs", "plain"),
        "assisted_b1_greedy": ratio("theirs assisted", fast),
        "assisted_b1_sampled": ratio("theirs assisted, sampled", "sampled"),
        "plain_b1_on_packed": ratio("theirs, packed", "plain"),
        "assisted_b1_greedy_on_packed": ratio("theirs assisted, packed", fast),
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

    ways: dict[str, Callable[[], float]] = {
        "theirs": lambda: theirs(bench.target, fill(32), bench.tokens),
        "ours": lambda: bench.ours(fill(32), None, 0, Sampling(1.0))[0],
        "plain": lambda: bench.ours(fill(8), None, 0)[0],
        "drafting": lambda: bench.ours(fill(8), bench.draft, bench.drafted)[0],
    }
    rows = []
    for repeat in range(3):
        order = list(ways) if repeat % 2 else list(reversed(ways))
        rows.append({name: ways[name]() for name in order})
    kept = total(bench.ours(fill(8), bench.draft, 1)[1].acceptance).rate
    return {
        "plain_b32": median(row["theirs"] / row["ours"] for row in rows[1:]),
        "batch8_ratio": median(row["plain"] / row["drafting"] for row in rows[1:]),
        "batch8_accepted_first": kept,
    }


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


def main() -> None:
    parser = subject.parser(__doc__)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--compile", action="store_true", help="also time compiled forwards, which take minutes to compile")
    parser.add_argument("--prompts", type=Path, action="append", default=[])
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--drafted", type=int, default=2, choices=range(1, LONGEST + 1))
    options = parser.parse_args()
    files, dtype = subject.chosen(options)
    tokenizer = files.tokenizer()
    if (options.draft is None) != (options.answers is None):
        parser.error("--draft and --answers belong together: a draft must not be timed on what it was trained on")
    sets = {path.stem: prompts_of.ids(tokenizer, prompts_of.read(path, options.count)) for path in options.prompts}
    target = files.load(dtype)
    if options.draft is None:
        fitting, raced = _halves(prompts_of.ids(tokenizer, prompts_of.read(None, 2 * options.count)))
        sets = {"standard library": raced, **sets}
        whole = stand_in.fitted(files.load(torch.float32), fitting)
    else:
        sets = {"held-out prompts": prompts_of.held_out(options.answers, options.count), **sets}
        whole = drafts.load(options.draft, torch.float32)
    prompts = [prompt for rows in sets.values() for prompt in rows]
    assistant = expand(whole, prompts, target.config.vocab_size).model.to(dtype)
    draft, useless = (Draft(pack(copy.deepcopy(one.model).to(dtype)), one.vocabulary) for one in (whole, never_right(whole)))
    fast = None
    if options.compile:
        fast = compiled(files.load(dtype)), Draft(compiled(copy.deepcopy(draft.model)), draft.vocabulary)
    bench = Bench(target, pack(files.load(dtype)), fast, draft, useless, assistant, options.tokens, options.drafted)
    *_, costs = measure(bench.packed, bench.draft, prompts[:4], GREEDY, longest=LONGEST)
    races = {name: race(bench, costs, rows) for name, rows in sets.items()}
    figures = one_at_a_time(bench, costs, races) | bound(target, costs)
    print(json.dumps(figures), file=sys.stderr, flush=True)  # minutes of work, should what follows be stopped
    figures |= in_batches(bench, prompts)
    measured = sum(map(len, races.values()))
    table = Table("", "", title=f"{measured} prompts, {options.tokens} new tokens, K = {options.drafted}, {dtype}")
    for name, value in figures.items():
        table.add_row(name, "–" if value is None else f"{value:.3f}")
    Console().print(table)
    print(json.dumps({**figures, "environment": machine()}))


def _halves(rows: list) -> tuple[list, list]:
    return rows[::2], rows[1::2]


if __name__ == "__main__":
    main()
