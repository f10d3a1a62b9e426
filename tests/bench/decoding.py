"""The engine against transformers on real prompts: plain, speculative, batched, automatic K; ratios of interleaved runs.

    python -m tests.bench.decoding [--target FOLDER] [--draft FOLDER] [--prompts FILE.jsonl] [--count 8] [--tokens 48]

``--draft`` is the ``draft`` folder of a distil stage. Without it two layers of the target with a fitted head stand in, which
shows costs and not what distillation reaches. ``--prompts`` takes JSON lines with ``turns`` or ``prompt``; without it,
prompts of the standard library are used. Ratios are times of the other ÷ ours, medians over prompts.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

import speculative
from data import standard_library
from data.batching import Batch
from data.targets import SparseTargets
from pipeline import baselines
from pipeline import draft as drafts
from pipeline.config import Draft as DraftConfig
from pipeline.expand import expand
from pipeline.generate import prompt_ids
from pipeline.hardware import machine
from pipeline.head_fit import fit_head
from speculative import Costs, Draft, Sampling
from speculative.calibration import measure
from speculative.metrics import total
from tests.bench import subject
from tests.bench.generation import theirs

GREEDY, NUCLEUS = Sampling(0.0), Sampling(1.0, top_p=0.9)
NOTHING = SparseTargets(torch.empty(0, 1), torch.empty(0, 1), torch.empty(0))


@dataclass(frozen=True)
class Bench:
    """What is compared on what; ``assistant`` is the draft as transformers takes it."""

    target: PreTrainedModel
    draft: Draft
    assistant: PreTrainedModel
    prompts: list[list[int]]
    tokens: int
    drafted: int

    def ours(self, prompts: list[list[int]], draft: Draft | None, length: int | Costs, sampling: Sampling = GREEDY):
        started = time.perf_counter()
        options = {"max_new_tokens": self.tokens, "num_draft_tokens": length, "sampling": sampling}
        done = speculative.generate(self.target, draft, prompts, **options)
        return time.perf_counter() - started, done

    def transformers(self, prompt: list[int], sampling: Sampling = GREEDY, assisted: bool = False) -> float:
        assistant = self.assistant if assisted else None
        return baselines.decode(self.target, prompt, self.tokens, sampling, 0, assistant, self.drafted).seconds


def stand_in(target: PreTrainedModel, prompts: list[list[int]]) -> Draft:
    """Two layers of the target and a head fitted on text that it writes."""
    draft = drafts.build(target, DraftConfig(), None)
    written = speculative.generate(target, None, prompts, max_new_tokens=48).tokens
    rows = [torch.tensor(prompt + text) for prompt, text in zip(prompts, written, strict=True)]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    predicts = torch.zeros_like(tokens, dtype=torch.bool)
    for place, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        predicts[place, len(prompt) - 1 : len(row) - 1] = True
    fit_head(draft, target, [Batch(tokens, predicts, NOTHING)])
    return draft


def one_at_a_time(bench: Bench, costs: Costs) -> dict[str, float]:
    """Batch 1: every way of decoding a prompt, one after the other, prompt by prompt; the first prompt warms up."""
    ratios: dict[str, list[float]] = {}
    phases, rounds, emitted, errors = {"bookkeeping": 0.0, "decoding": 0.0}, 0, 0, []
    fixed = {length: 0.0 for length in range(costs.longest + 1)}
    automatic = 0.0
    for number, prompt in enumerate(bench.prompts):
        plain, without = bench.ours([prompt], None, 0)
        fast, done = bench.ours([prompt], bench.draft, bench.drafted)
        sampled, _ = bench.ours([prompt], bench.draft, bench.drafted, NUCLEUS)
        chosen, _ = bench.ours([prompt], bench.draft, costs)
        lengths = {length: bench.ours([prompt], bench.draft if length else None, length)[0] for length in fixed}
        measured = {
            "plain_b1_eager": bench.transformers(prompt) / plain,
            "assisted_b1_greedy": bench.transformers(prompt, assisted=True) / fast,
            "assisted_b1_sampled": bench.transformers(prompt, NUCLEUS, assisted=True) / sampled,
            "speculative_ratio": plain / fast,
            "auto_k_ratio": plain / chosen,
        }
        if number == 0:
            continue
        for name, value in measured.items():
            ratios.setdefault(name, []).append(value)
        counts = total(done.acceptance)
        predicted = counts.tokens_per_round / costs.round(bench.drafted)
        errors.append((without.seconds.decoding / done.seconds.decoding) / predicted - 1)
        phases["bookkeeping"] += done.seconds.bookkeeping
        phases["decoding"] += done.seconds.decoding
        rounds, emitted = rounds + counts.target_forwards, emitted + counts.emitted
        automatic += chosen
        fixed = {length: seconds + lengths[length] for length, seconds in fixed.items()}
    return {name: median(values) for name, values in ratios.items()} | {
        "tokens_per_round": emitted / rounds,
        "bookkeeping_share": phases["bookkeeping"] / phases["decoding"],
        "auto_k_worst_ratio": min(ratios["auto_k_ratio"]),
        "auto_k_of_best_fixed": min(fixed.values()) / automatic,
        "prediction_error": median(errors),
    }


def in_batches(bench: Bench) -> dict[str, float]:
    """Batch 32 plain against transformers, batch 8 speculative against plain here."""

    def fill(size: int) -> list[list[int]]:
        return sorted((bench.prompts[i % len(bench.prompts)] for i in range(size)), key=len)

    found: dict[str, list[float]] = {"plain_b32": [], "batch8_ratio": []}
    for repeat in range(3):
        wide = theirs(bench.target, fill(32), bench.tokens) / bench.ours(fill(32), None, 0, Sampling(1.0))[0]
        eight = bench.ours(fill(8), None, 0)[0] / bench.ours(fill(8), bench.draft, bench.drafted)[0]
        if repeat > 0:
            found["plain_b32"].append(wide)
            found["batch8_ratio"].append(eight)
    return {name: median(values) for name, values in found.items()}


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
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--drafted", type=int, default=2)
    options = parser.parse_args()
    files, dtype = subject.chosen(options)
    tokenizer = files.tokenizer()
    texts = read_prompts(options.prompts, options.count)
    prompts = [prompt_ids(tokenizer, text, None)[-256:] for text in texts]
    if options.draft is None:
        whole = stand_in(files.load(torch.float32), prompts[: max(2, len(prompts) // 2)])
    else:
        whole = drafts.load(options.draft, torch.float32)
    assistant = expand(whole, prompts).model.to(dtype)
    draft = Draft(whole.model.to(dtype), whole.vocabulary)
    bench = Bench(files.load(dtype), draft, assistant, prompts, options.tokens, options.drafted)
    *_, costs = measure(bench.target, bench.draft, prompts[:4], GREEDY, longest=4)
    figures = one_at_a_time(bench, costs) | in_batches(bench)
    table = Table("", "", title=f"{len(prompts) - 1} prompts, {options.tokens} new tokens, K = {options.drafted}, {dtype}")
    for name, value in figures.items():
        table.add_row(name, f"{value:.3f}")
    Console().print(table)
    print(json.dumps({**figures, "plain_b1_compiled": None, "environment": machine()}))


if __name__ == "__main__":
    main()
