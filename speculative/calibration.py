"""Costs of this machine, measured in the loop that will use them.

A draft step and a verification are timed inside real rounds, alternating as they do in decoding, since timing either
alone would find the caches warm. Interleaved over K, medians over repeats. What is drafted does not matter to the cost.
"""

from collections.abc import Iterator, Sequence
from statistics import median

from transformers import PreTrainedModel

from speculative.api import generate
from speculative.cost import Costs
from speculative.drafters import Draft
from speculative.metrics import Phases, total
from speculative.sampling import Sampling


def measure(
    target: PreTrainedModel,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    longest: int,
    new_tokens: int = 32,
) -> Iterator[Costs]:
    """Yield the costs known after each prompt; the last ones are the result, the first (a warm-up) are dropped.

    Args:
        target, draft, sampling: the pair as it will be used.
        prompts: one repeat each, at least two.
        longest: the largest K.
        new_tokens: decoded in each call.
    """
    samples: list[list[tuple[float, float, float]]] = [[] for _ in range(longest + 1)]  # by K: draft, target, other
    for number, prompt in enumerate(prompts):
        for drafts in range(longest + 1):
            done = generate(
                target, draft, [prompt], max_new_tokens=new_tokens, num_draft_tokens=drafts, sampling=sampling, seed=number
            )
            if number > 0:
                samples[drafts].append(_by_round(done.seconds, total(done.acceptance).target_forwards))
        if number > 0:
            yield _costs(samples)


def _by_round(seconds: Phases, rounds: int) -> tuple[float, float, float]:
    return seconds.draft / rounds, seconds.target / rounds, seconds.other / rounds


def _costs(samples: list[list[tuple[float, float, float]]]) -> Costs:
    middle = [[median(column) for column in zip(*rows, strict=True)] for rows in samples]
    plain = middle[0][1] + middle[0][2]
    steps = [draft / drafts for drafts, (draft, _, _) in enumerate(middle) if drafts > 0]
    return Costs(
        plain_seconds=plain,
        draft=median(steps) / plain,
        verify=tuple(target / plain for _, target, _ in middle),
        other=tuple(other / plain for _, _, other in middle),
    )
