"""Costs of this machine, measured in the loop that will use them.

A draft step and a verification are timed inside real rounds, alternating as they do in decoding, since timing either
alone would find the caches warm; what reading a prompt costs comes from the same calls. Interleaved over K, medians over
repeats. What is drafted does not matter to the cost.
"""

from collections.abc import Iterator, Sequence
from statistics import median

from transformers import PreTrainedModel

from speculative.api import generate
from speculative.cost import Costs
from speculative.drafters import Draft
from speculative.medusa import MedusaHeads
from speculative.metrics import Phases, total
from speculative.sampling import Sampling
from speculative.tree_choice import TreeCosts


def measure(
    target: PreTrainedModel,
    draft: Draft | MedusaHeads,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    longest: int,
    vocabulary_size: int | None = None,
    new_tokens: int = 32,
) -> Iterator[Costs]:
    """Yield the costs known after each prompt; the last ones are the result, the first (a warm-up) are dropped.

    Args:
        target, draft, sampling: the pair as it will be used.
        prompts: one repeat each, at least two.
        longest: the largest K.
        vocabulary_size: as ``generate`` takes it.
        new_tokens: decoded in each call.
    """
    samples: list[list[tuple[float, float, float]]] = [[] for _ in range(longest + 1)]  # by K: draft, target, other
    reading: tuple[list[float], list[float]] = ([], [])  # seconds a prompt token: by the target alone, by both
    for number, prompt in enumerate(prompts):
        for drafts in range(longest + 1):
            done = generate(
                target,
                draft,
                [prompt],
                max_new_tokens=new_tokens,
                num_draft_tokens=drafts,
                sampling=sampling,
                seed=number,
                vocabulary_size=vocabulary_size,
            )
            if number > 0:
                samples[drafts].append(_by_round(done.seconds, total(done.acceptance).target_forwards))
                reading[min(drafts, 1)].append(done.seconds.prefill / len(prompt))
        if number > 0:
            yield _costs(samples, reading, isinstance(draft, MedusaHeads))


def _by_round(seconds: Phases, rounds: int) -> tuple[float, float, float]:
    return seconds.draft / rounds, seconds.target / rounds, seconds.other / rounds


def _costs(samples: list[list[tuple[float, float, float]]], reading: tuple[list[float], list[float]], heads: bool) -> Costs:
    """Costs from (draft, target, other) seconds a round by K, and seconds a prompt token by the target alone and by both.

    ``heads`` answer all at once, whatever K is.
    """
    middle = [[median(column) for column in zip(*rows, strict=True)] for rows in samples]
    plain = middle[0][1] + middle[0][2]
    steps = [draft / (1 if heads else drafts) for drafts, (draft, _, _) in enumerate(middle) if drafts > 0]
    drafting = median(steps) / plain
    alone, both = map(median, reading)
    return Costs(
        plain_seconds=plain,
        draft=0.0 if heads else drafting,
        heads=drafting if heads else 0.0,
        verify=tuple(target / plain for _, target, _ in middle),
        other=tuple(other / plain for _, _, other in middle),
        reading=alone / plain,
        draft_reading=max(both - alone, 0.0) / plain,
    )


WIDTHS = (1, 2, 4, 8, 16)  # of the trees that are timed


def measure_trees(
    target: PreTrainedModel,
    draft: Draft | MedusaHeads,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    widths: Sequence[int] = WIDTHS,
    new_tokens: int = 64,
    vocabulary_size: int | None = None,
) -> Iterator[TreeCosts]:
    """The same for trees: ``widths`` w, 1 the first, are timed as trees (w, 1), whose second draft forward feeds w nodes."""
    rounds: dict[int, list[tuple[float, float, float]]] = {width: [] for width in (0, *widths)}  # 0: plain
    for number, prompt in enumerate(prompts):
        for width in rounds:
            shape = {"tree": (width, 1)} if width else {"num_draft_tokens": 0}
            options = {"max_new_tokens": new_tokens, "sampling": sampling, "vocabulary_size": vocabulary_size}
            done = generate(target, draft, [prompt], seed=number, **options, **shape)
            if number > 0:
                rounds[width].append(_by_round(done.seconds, total(done.acceptance).target_forwards))
        if number > 0:
            yield tree_costs(rounds, isinstance(draft, MedusaHeads))


def tree_costs(rounds: dict[int, list[tuple[float, float, float]]], heads: bool = False) -> TreeCosts:
    """Costs from (draft, target, other) seconds a round by the width w of trees (w, 1), 0 for plain rounds.

    ``heads`` answer once for the whole tree; what a wider level adds to that are the draws of its children.
    """
    middle = {width: [median(column) for column in zip(*rows, strict=True)] for width, rows in rounds.items()}
    _, target, other = middle.pop(0)
    plain = target + other
    step = middle[1][0] / (1 if heads else 2)
    draft = {width: max(seconds - step, 0.0) / plain for width, (seconds, _, _) in middle.items()}
    verify = {2 * width: (target + other) / plain for width, (_, target, other) in middle.items()}
    return TreeCosts(plain, tuple(draft.items()), ((0, 1.0), *verify.items()), step / plain if heads else 0.0)
