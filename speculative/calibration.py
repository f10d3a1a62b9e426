"""Costs of this machine, measured in the loop that will use them.

A draft step and a verification are timed inside real rounds, alternating as they do in decoding, since timing either
alone would find the caches warm; what reading a prompt costs comes from the same calls. Interleaved over K, medians over
repeats. What is drafted does not matter to the cost. Only rounds with all their drafts count: those that the end of the
budget cuts short are cheaper.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from transformers import PreTrainedModel

from speculative.api import prepare
from speculative.cost import Costs
from speculative.drafters import Draft
from speculative.medusa import MedusaHeads
from speculative.metrics import Phases
from speculative.sampling import Sampling
from speculative.tree_choice import TreeCosts

Seconds = tuple[float, float, float]  # of a round: draft, target, other


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
        new_tokens: decoded in each call, and up to 2K + 1 more.
    """
    samples: list[list[Seconds]] = [[] for _ in range(longest + 1)]  # by K
    reading: tuple[list[float], list[float]] = ([], [])  # seconds a prompt token: by the target alone, by both
    for number, prompt in enumerate(prompts):
        options = {"sampling": sampling, "seed": number, "vocabulary_size": vocabulary_size}
        for drafts in range(longest + 1):
            prefill, seconds = _timed(target, draft, prompt, drafts, new_tokens, num_draft_tokens=drafts, **options)
            if number > 0:
                samples[drafts].append(seconds)
                reading[min(drafts, 1)].append(prefill / max(len(prompt) - 1, 1))
        if number > 0:
            yield _costs(samples, reading, isinstance(draft, MedusaHeads))


def _timed(
    target: PreTrainedModel, draft: Draft | MedusaHeads, prompt: Sequence[int], depth: int, new_tokens: int, **options: Any
) -> tuple[float, Seconds]:
    """Seconds of the prefill, and of a round with all its drafts, ``depth`` in a row.

    The first round does not count: Medusa heads have nothing to read yet.
    """
    decoding, _ = prepare(target, draft, [prompt], max_new_tokens=new_tokens + 2 * depth + 1, **options)
    decoding.advance()
    before, rounds = replace(decoding.seconds), 0
    while decoding.left > depth:
        decoding.advance()
        rounds += 1
    return before.prefill, _by_round(decoding.seconds.since(before), rounds)


def _by_round(seconds: Phases, rounds: int) -> Seconds:
    return seconds.draft / rounds, seconds.target / rounds, seconds.other / rounds


def _costs(samples: list[list[Seconds]], reading: tuple[list[float], list[float]], heads: bool) -> Costs:
    """Costs from seconds a round by K, and seconds a prompt token by the target alone and by both.

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
    rounds: dict[int, list[Seconds]] = {width: [] for width in (0, *widths)}  # 0: plain
    for number, prompt in enumerate(prompts):
        options = {"sampling": sampling, "seed": number, "vocabulary_size": vocabulary_size}
        for width in rounds:
            shape = {"tree": (width, 1)} if width else {"num_draft_tokens": 0}
            _, seconds = _timed(target, draft, prompt, 2 if width else 0, new_tokens, **shape, **options)
            if number > 0:
                rounds[width].append(seconds)
        if number > 0:
            yield tree_costs(rounds, isinstance(draft, MedusaHeads))


def tree_costs(rounds: dict[int, list[Seconds]], heads: bool = False) -> TreeCosts:
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
