"""The text that the cache's benchmark is about, with the states that the target's head read while it wrote.

Both lie in a folder as stage generate leaves it, so the text of a finished run serves as well as one written here. Where
the states were kept, a distribution costs one product with the head and not the whole target.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel

import speculative
from data.responses import Request, Response, read_shards, write_shard
from data.states import States, states_file, write_states
from pipeline.teacher import known

AT_ONCE = 64  # rows that the target answers in one batch


def write(
    model: PreTrainedModel, prompts: list[list[int]], positions: int, tokens: int, folder: Path, eos: Sequence[int] = ()
) -> None:
    """Answers of the target at temperature 1, into ``folder``, until they have ``positions`` tokens; ``eos`` ids end one."""
    count = 0
    for number, first in enumerate(track(range(0, len(prompts), AT_ONCE), description="the target answers", transient=True)):
        batch = prompts[first : first + AT_ONCE]
        requests = [Request(first + at, "train", str(first + at), "bench", 1.0, tuple(p)) for at, p in enumerate(batch)]
        done = speculative.generate(
            model,
            None,
            batch,
            max_new_tokens=tokens,
            sampling=speculative.Sampling(1.0),
            eos_token_ids=list(eos),
            row_keys=[request.key for request in requests],
            states=True,
        )
        shard = folder / f"shard-{number:05d}.parquet"
        write_states(states_file(shard), [request.key for request in requests], done.states)
        rows = zip(requests, done.tokens, done.stopped, strict=True)
        write_shard(shard, (Response(r, tuple(t), stopped) for r, t, stopped in rows))
        count += sum(map(len, done.tokens))
        if count >= positions:
            break


def read(folder: Path, positions: int) -> list[Response]:
    """Answers at temperature 1, in an order that mixes them, until they have ``positions`` tokens.

    Raises:
        ValueError: there are not as many.
    """
    rows = [r for r in read_shards(folder) if r.tokens and r.request.temperature == 1.0]
    random.Random(0).shuffle(rows)
    count = 0
    for place, row in enumerate(rows):
        count += len(row.tokens)
        if count >= positions:
            return rows[: place + 1]
    raise ValueError(f"{folder} holds {count} tokens at temperature 1, fewer than the {positions} that --positions asks for")


def log_probs(model: PreTrainedModel, row: Response, states: States) -> Tensor:
    """The target's log-probabilities (N, V) in float32 at the positions that predict the tokens of ``row``."""
    with torch.inference_mode():
        return known(model, [row], states, False)[0].float().log_softmax(-1)
