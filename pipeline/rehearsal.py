"""What the logit cache would cost and what it loses: the dry run over all codecs, and the fidelity of the chosen one.

Both need a target and responses, neither writes anything.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from data.codec import Codec
from data.fidelity import Fidelity, measures, noisy, summary
from data.hidden import Hidden
from data.responses import Response
from data.states import States
from pipeline import coding
from pipeline.choices import Coding
from pipeline.coding import Parts, kept_states
from pipeline.context import Context
from pipeline.teacher import ROLLOUTS, decoded, known
from speculative import pack

NOISE = 1.0  # of the logits of the stand-in for a draft


@torch.inference_mode()
def fidelity(
    model: PreTrainedModel, codecs: Sequence[Codec], sample: list[Response], states: States | None, ids: int
) -> list[Fidelity]:
    """What each codec loses on ``sample``, whose dense distributions are made once and held one row at a time."""
    parts: list[list[Tensor]] = [[] for _ in codecs]
    for response in sample:
        key = response.request.key
        logits = known(model, [response], states, False, ids)[0].cpu()
        if any(isinstance(codec, Hidden) for codec in codecs):
            hidden = known(model, [response], states, True)[0].cpu()
        log_p = logits.float().log_softmax(-1)
        log_q = noisy(log_p, NOISE, key)
        for codec, measured in zip(codecs, parts, strict=True):
            stored = codec.encode(hidden if isinstance(codec, Hidden) else logits, key)
            measured.append(measures(log_p, decoded(codec, stored, model, ids), log_q))
    return [summary(torch.cat(measured)) for measured in parts]


def show(context: Context) -> None:
    """Print bytes per token, size, free disk and expected time for every codec; write nothing."""
    model, rows = pack(context.target.load(context.dtype)), coding.responses(context)
    states, free = kept_states(context, model), shutil.disk_usage(context.work).free
    table = Table(title=f"Dry run: {free / 1e9:.2f} GB are free, nothing is written")
    for heading in ("codec", "bytes per token (train)", "total, MB", "fits", "minutes, about"):
        table.add_column(heading, justify="left" if heading == "codec" else "right")
    for kind in (kind for kind in Coding if kind is not Coding.auto):
        config = replace(context.config, codec=replace(context.config.codec, kind=kind))
        parts = coding.parts(config, rows)
        total = coding.estimate(parts, model, config)
        train = coding.estimate({"train": parts["train"]}, model, config)
        tokens = max(1, sum(len(r.tokens) for r in parts["train"][0]))
        fits = "yes" if total + coding.SPARE_BYTES <= free else "no"
        try:
            minutes = f"{seconds(model, parts, config.codec.batch_size, states, context.target.ids) / 60:.1f}"
        except ValueError as error:  # of codec hidden alone
            fits, minutes = "no", str(error)
        table.add_row(kind.name, f"{train / tokens:.1f}", f"{total / 1e6:.2f}", fits, minutes)
    Console().print(table)


@torch.inference_mode()
def seconds(model: PreTrainedModel, parts: Parts, size: int, states: States | None, ids: int) -> float:
    """Seconds to make the whole cache, from one batch of training text: of the head alone where ``states`` were kept.

    What a draft continues goes through the target whatever was kept.
    """
    rolled = parts.get(ROLLOUTS)
    if rolled is not None:
        rest = {name: part for name, part in parts.items() if name != ROLLOUTS}
        return seconds(model, rest, size, states, ids) + seconds(model, {"train": rolled}, size, None, ids)
    rows, codec = parts["train"]
    batch, hidden = rows[:size], isinstance(codec, Hidden)
    if not batch:
        return 0.0
    known(model, batch[:1], states, hidden, ids)  # weights that were never used may still lie on the disk
    began = time.perf_counter()
    for output, response in zip(known(model, batch, states, hidden, ids), batch, strict=True):
        codec.encode(output, response.request.key)
    spent = time.perf_counter() - began
    every = [r for rows, _ in parts.values() for r in rows]
    return spent * _computed(every, states) / _computed(batch, states)


def _computed(rows: list[Response], states: States | None) -> int:
    """Positions that a pass over ``rows`` computes: where states were kept, those of the responses alone."""
    return sum(r.length if states is None else len(r.tokens) for r in rows)
