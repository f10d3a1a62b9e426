"""``codec=auto``: the cheapest codec that estimates a draft's overlap well enough, judged on the user's own text.

Held-out rows are encoded by every candidate and compared with the dense distributions, which are made once. It writes
nothing and knows nothing of shards. On a target of narrow hidden states those may be cheapest, on a wide one they
cannot.
"""

import logging
from dataclasses import replace

from transformers import PreTrainedModel

from data.responses import Response
from data.serving import refusal
from data.states import States
from pipeline import coding, rehearsal
from pipeline.choices import Coding
from pipeline.config import Codec, Config
from pipeline.draft import head_is_last
from pipeline.errors import PipelineError

SAMPLE = 32  # held-out rows that are kept dense
# Exact and drawn ids of the sparse candidates.
SPARSE = ((8, 6), (16, 8), (32, 14), (64, 28), (128, 56))

log = logging.getLogger("draftsmith")


def choose(config: Config, model: PreTrainedModel, rows: list[Response], states: States | None, ids: int) -> Codec:
    """The cheapest candidate whose overlap error, two standard errors added, is at most ``codec.max_overlap_error``.

    Raises:
        PipelineError: there is no held-out text to judge by, or a state of it that half precision does not hold.
    """
    sample = [r for r in rows if r.request.split == "validation"][:SAMPLE]
    if not sample:
        raise PipelineError("codec.kind=auto: no validation prompt got an answer to judge by; name a codec, or add prompts")
    offered = candidates(config, model, rows)
    codecs = [coding.parts(replace(config, codec=candidate), rows)["train"][1] for candidate in offered]
    try:
        measured = rehearsal.fidelity(model, codecs, sample, states, ids)
    except ValueError as error:  # of codec hidden alone
        raise PipelineError(f"codec.kind=auto: {error}, which codec=hidden needs; use codec=topk, or codec=dense") from error
    for candidate, codec, found in zip(offered, codecs, measured, strict=True):
        error = abs(found.overlap_bias) + 2 * found.overlap_standard_error
        log.info("codec.kind=auto: %s is off by %.4f at most", codec, error)
        if error <= config.codec.max_overlap_error:
            return candidate
    return replace(config.codec, kind=Coding.dense)


def candidates(config: Config, model: PreTrainedModel, rows: list[Response]) -> list[Codec]:
    """Codecs that can serve the objective, the cheapest for these rows first; dense, which is always right, not among them."""
    sparse = [replace(config.codec, kind=Coding.topk, top_k=k, tail_samples=m, bits=8) for k, m in SPARSE]
    exact = [replace(config.codec, kind=Coding.topk, top_k=k, tail_samples=0, bits=8) for k, _ in SPARSE]
    hidden = [replace(config.codec, kind=Coding.hidden, bits=bits) for bits in (8, 16)] if head_is_last(model, 1e-2) else []
    objective = config.objective.divergence.name
    able = [codec for codec in (*sparse, *exact, *hidden) if refusal(codec.kind.name, objective) is None]
    return sorted(able, key=lambda codec: _bytes(replace(config, codec=codec), model, rows))


def _bytes(config: Config, model: PreTrainedModel, rows: list[Response]) -> int:
    return coding.estimate({"train": coding.parts(config, rows)["train"]}, model, config)
