"""transformers' own ``generate``, alone or assisted, as baseline: as many tokens, the best settings.

Assistance runs at our K with a constant schedule and no confidence stop: its defaults draft 20 tokens and are slower.
"""

import time
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel

from speculative import Sampling


@dataclass(frozen=True)
class Decoded:
    """The new ids of one prompt and the wall seconds of the call."""

    tokens: list[int]
    seconds: float


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
        with torch.inference_mode(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            helper = {} if assistant is None else {"assistant_model": assistant}
            output = target.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **helper)
    finally:
        for ending, eos in zip(endings, kept, strict=True):
            ending.eos_token_id = eos
    seconds = time.perf_counter() - started
    written = output[0, len(prompt) :].tolist()
    if len(written) != new_tokens:
        raise RuntimeError(f"transformers wrote {len(written)} tokens where {new_tokens} were asked for")
    return Decoded(written, seconds)
