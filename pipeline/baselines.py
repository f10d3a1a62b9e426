"""transformers' own ``generate``, alone or assisted, as baseline: as many tokens, the best settings.

Assistance runs at our K with a constant schedule and no confidence stop: its defaults draft 20 tokens and are slower.
It tells nothing of its rounds, so forwards are counted and timed from outside: each forward of the target is a round, each of
the assistant a drafted token.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, PreTrainedModel

from speculative import Sampling


@dataclass(frozen=True)
class Decoded:
    """The new ids of one prompt, the wall seconds of the call, and those of each forward of the target and of the assistant."""

    tokens: list[int]
    seconds: float
    target_forwards: list[float]
    draft_forwards: list[float] = field(default_factory=list)


@contextmanager
def timed(model: PreTrainedModel) -> Iterator[list[float]]:
    """The seconds of every forward of ``model`` inside, in order."""
    found: list[float] = []
    begun: list[float] = []
    hooks = [
        model.register_forward_pre_hook(lambda *_: begun.append(_now(model))),
        model.register_forward_hook(lambda *_: found.append(_now(model) - begun.pop())),
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _now(model: PreTrainedModel) -> float:
    if model.device.type != "cpu":
        torch.accelerator.synchronize(model.device)  # an accelerator answers before it is done
    return time.perf_counter()


def decode(
    target: PreTrainedModel,
    prompt: list[int],
    new_tokens: int,
    sampling: Sampling,
    seed: int,
    assistant: PreTrainedModel | None = None,
    draft_tokens: int = 0,
    ids: int | None = None,
) -> Decoded:
    """Continue ``prompt`` by exactly ``new_tokens`` tokens, EOS ids being no reason to stop.

    Ids from ``ids`` on are not chosen; None: all may be, which costs no pass over the vocabulary.
    """
    started = time.perf_counter()
    options = {} if sampling.greedy else {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    if sampling.min_p:  # a filter that is switched off would still cost a pass over the vocabulary
        options["min_p"] = sampling.min_p
    if ids is not None and ids < target.config.vocab_size:
        options["suppress_tokens"] = list(range(ids, target.config.vocab_size))
    config = GenerationConfig(do_sample=not sampling.greedy, max_new_tokens=new_tokens, pad_token_id=0, **options)
    if assistant is not None:
        assistant.generation_config.num_assistant_tokens = draft_tokens
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
    endings = [model.generation_config for model in (target, assistant) if model is not None]
    kept = [ending.eos_token_id for ending in endings]
    ids = torch.tensor([prompt], device=target.device)
    try:
        for ending in endings:
            ending.eos_token_id = None
        with torch.inference_mode(), torch.random.fork_rng(devices=[]), ExitStack() as clocks:
            torch.manual_seed(seed)
            forwards = [clocks.enter_context(timed(model)) for model in (target, assistant) if model is not None]
            helper = {} if assistant is None else {"assistant_model": assistant}
            output = target.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **helper)
    finally:
        for ending, eos in zip(endings, kept, strict=True):
            ending.eos_token_id = eos
    seconds = time.perf_counter() - started
    written = output[0, len(prompt) :].tolist()
    if len(written) != new_tokens:
        raise RuntimeError(f"transformers wrote {len(written)} tokens where {new_tokens} were asked for")
    return Decoded(written, seconds, *forwards)
