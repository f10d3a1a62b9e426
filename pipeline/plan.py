"""What the race will run, and the prediction for exactly that, made before anything is decoded.

Each prompt is continued by as many tokens as the target's own answer has, so the agreement measured on that answer says
how many rounds its continuation will need. The race times whole calls, so the prediction includes reading the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from data.responses import Response
from pipeline.config import Decoding
from pipeline.errors import PipelineError
from pipeline.held_out import HeldOut
from pipeline.spread import spread
from pipeline.statistics import median_interval
from speculative import Sampling
from speculative.cost import Costs, expected_ratio, rounds_needed

SHORTEST = 16  # tokens; answers below this say more about prefill than about decoding


@dataclass(frozen=True)
class Heat:
    """One prompt to decode in every way: ``new_tokens`` after it at K = ``draft_tokens``; ``predicted`` is its speed ratio."""

    answer: Response
    new_tokens: int
    draft_tokens: int
    sampling: Sampling
    predicted: float


@dataclass(frozen=True)
class Plan:
    """The heats of one temperature; ``predicted`` is their median ratio, ``tokens_per_round`` their expected τ."""

    heats: list[Heat]
    sampling: Sampling
    draft_tokens: int
    predicted: float
    tokens_per_round: float


def make(
    answers: Sequence[Response],
    held: HeldOut,
    costs: Costs,
    length: int,
    sampling: Sampling,
    config: Decoding,
    seed: int,
) -> Plan:
    """``decoding.prompts`` of the answers that are long enough, at even distances; ``held`` is the agreement on ``answers``.

    Raises:
        PipelineError: no answer is long enough to be timed.
    """
    heats: list[Heat] = []
    rounds = tokens = 0.0
    texts = list(zip(answers, held.acceptance, held.deeper, strict=True))
    shortest = min(SHORTEST, config.max_new_tokens)
    for answer, chances, more in spread([text for text in texts if len(text[0].tokens) >= shortest], config.prompts):
        wanted = min(len(answer.tokens), config.max_new_tokens)
        chances, more = chances[:wanted], [later[:wanted] for later in more]
        rounds += rounds_needed(chances, length, more)
        tokens += wanted
        predicted = expected_ratio(chances, costs, length, more, len(answer.request.prompt))
        heats.append(Heat(answer, wanted, length, sampling, predicted))
    if not heats:
        raise PipelineError(
            f"decoding.max_new_tokens={config.max_new_tokens}: no test answer at temperature {sampling.temperature:g} has "
            f"{SHORTEST} tokens; raise corpus.test or generate.max_new_tokens"
        )
    predicted, _, _ = median_interval([heat.predicted for heat in heats], seed)
    return Plan(heats, sampling, length, predicted, tokens / rounds)
