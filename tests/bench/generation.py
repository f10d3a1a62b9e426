"""Batched generation here against transformers' ``generate``: tokens per second, batch 64, interleaved in one run.

    python -m tests.bench.generation [--target FOLDER] [--batch 64] [--tokens 64] [--repeats 3]

Without ``--target``, the model of ``make run`` is used. Both sample at temperature 1, both write the same number of tokens,
from the same prompts sorted by length.
"""

import json
import time
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, PreTrainedModel

import speculative
from data import standard_library
from pipeline.hardware import machine
from pipeline.requests import prompt_ids
from tests.bench import subject


def ours(model: PreTrainedModel, prompts: list[list[int]], tokens: int) -> float:
    started = time.perf_counter()
    speculative.generate(model, None, prompts, max_new_tokens=tokens, sampling=speculative.Sampling(1.0))
    return time.perf_counter() - started


def theirs(model: PreTrainedModel, prompts: list[list[int]], tokens: int) -> float:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=tokens, pad_token_id=0)
    ending, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(ids, attention_mask=mask, generation_config=config)
    seconds = time.perf_counter() - started
    model.generation_config.eos_token_id = ending
    return seconds


def main() -> None:
    parser = subject.parser(__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    files, dtype = subject.chosen(options)
    model, tokenizer = files.load(dtype), files.tokenizer()
    texts, _ = standard_library.read()
    step = len(texts) // options.batch
    prompts = sorted((prompt_ids(tokenizer, p.text, None)[-256:] for p in texts[::step][: options.batch]), key=len)
    rates: dict[str, list[float]] = {"draftsmith": [], "transformers": []}
    for repeat in range(options.repeats + 1):
        for name, function in (("draftsmith", ours), ("transformers", theirs)):
            rate = options.batch * options.tokens / function(model, prompts, options.tokens)
            if repeat > 0:  # the first round warms up
                rates[name].append(rate)
    ratios = [a / b for a, b in zip(rates["draftsmith"], rates["transformers"], strict=True)]
    table = Table(
        "", "tokens/s (median)", "lowest", "highest", title=f"batch {options.batch}, {options.tokens} new tokens, {dtype}"
    )
    for name, values in rates.items():
        table.add_row(name, *(f"{value:.0f}" for value in (median(values), min(values), max(values))))
    Console().print(table)
    print(
        json.dumps(
            {"batch_generation_ratio": median(ratios), "lowest": min(ratios), "highest": max(ratios), "environment": machine()}
        )
    )


if __name__ == "__main__":
    main()
