"""What advice is made from: a small sample of what a target writes, and how long the machine takes for the pair.

Nothing is kept on disk.
"""

import time
from collections.abc import Sequence
from statistics import median

import torch
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import speculative
from data.prompts import Prompt
from data.responses import Request, Response
from pipeline.errors import PipelineError
from pipeline.generate import eos_token_ids
from pipeline.requests import prompt_ids
from speculative import Draft, Sampling
from speculative.calibration import measure
from speculative.cost import Costs

LONGEST_PROMPT = 256  # tokens; of longer ones the end is taken
REPEATS = 3
CALLS = 4  # of a calibration, the first a warm-up


def write(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    count: int,
    tokens: int,
    temperature: float,
) -> list[Response]:
    """The target's answers to ``count`` prompts, spread evenly over all, of at most ``tokens`` each.

    Raises:
        PipelineError: fewer than two answers have text.
    """
    chosen = [prompts[place * len(prompts) // count] for place in range(min(count, len(prompts)))]
    requests = [
        Request(key, "test", p.id, p.kind, temperature, tuple(prompt_ids(tokenizer, p.text, None)[-LONGEST_PROMPT:]))
        for key, p in enumerate(chosen)
    ]
    done = speculative.generate(
        target,
        None,
        [request.prompt for request in requests],
        max_new_tokens=tokens,
        sampling=Sampling(temperature),
        eos_token_ids=eos_token_ids(target, tokenizer),
        seed=0,
    )
    rows = zip(requests, done.tokens, done.stopped, strict=True)
    answers = [Response(request, tuple(ids), stopped) for request, ids, stopped in rows if ids]
    if len(answers) < 2:
        raise PipelineError(f"--sample={count}: {len(answers)} answers of the target have text, two or more are needed")
    return answers


@torch.inference_mode()
def mean_law(target: PreTrainedModel, answers: Sequence[Response]) -> Tensor:
    """The target's mean distribution over all positions of ``answers`` at temperature 1, (V,)."""
    total, positions = torch.zeros(()), 0
    for answer in answers:
        ids = torch.tensor([answer.request.prompt + answer.tokens], device=target.device)
        logits = target(input_ids=ids, logits_to_keep=len(answer.tokens) + 1, use_cache=False).logits[0, :-1]
        total, positions = total + logits.float().softmax(-1).sum(0).cpu(), positions + len(answer.tokens)
    return total / positions


def calibrated(target: PreTrainedModel, draft: Draft, texts: Sequence[Response], sampling: Sampling, longest: int) -> Costs:
    """Costs of one row for K up to ``longest``, measured while decoding after the prompts of ``texts``."""
    prompts = [texts[place % len(texts)].request.prompt for place in range(CALLS)]
    return list(measure(target, draft, prompts, sampling, longest))[-1]


def timed(target: PreTrainedModel, draft: Draft, most: int) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of forwards of the target and of the draft, by tokens, up to ``most``."""
    return forwards(target, most, "forwards, target"), forwards(draft.model, most, "forwards, draft")


@torch.inference_mode()
def forwards(model: PreTrainedModel, most: int, title: str) -> dict[int, float]:
    """Seconds of a forward over n tokens, for n = 1, 2, 4, … and ``most``: n rows of one position, as in a large batch.

    Medians over repeats, all n in turns; the first turn is dropped.
    """
    counts = sorted({1 << power for power in range(most.bit_length()) if 1 << power < most} | {1, most})
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for turn in track(range(REPEATS + 1), description=f"{title:<28}", transient=True):
        for count in counts:
            ids = torch.zeros(count, 1, dtype=torch.long, device=model.device)
            begun = time.perf_counter()
            model(input_ids=ids, use_cache=False)
            if turn:
                seconds[count].append(time.perf_counter() - begun)
    return {count: median(times) for count, times in seconds.items()}
