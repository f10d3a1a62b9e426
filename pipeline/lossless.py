"""Proof on real text: greedy speculative output equals greedy plain output, token for token, in float32.

transformers' own ``generate``, alone and assisted by the same draft if it is a model, is the oracle for the first prompts:
it shares no code with the engine here. Float32, because in low precision two equal logits may change places with the
batch's shape.
"""

from collections.abc import Sequence
from typing import Any

from rich.progress import track
from transformers import PreTrainedModel

import speculative
from pipeline import baselines
from speculative import Draft, MedusaHeads, Sampling, Tree

BATCH = 8
ORACLE_PROMPTS = 4  # transformers decodes them one at a time, twice


def prove(
    target: PreTrainedModel,
    draft: Draft | MedusaHeads,
    helpers: Sequence[PreTrainedModel | None],
    prompts: Sequence[tuple[int, ...]],
    tokens: int,
    length: int,
    trees: Sequence[Tree] = (),
    ids: int | None = None,
) -> dict[str, Any]:
    """Compare ``tokens`` new tokens of every prompt at K = ``length``, and with each of ``trees``; all models in float32.

    ``helpers`` are what transformers decodes with, None alone; without any there is no oracle. ``ids`` of the target can be
    chosen, rows of its head behind them are padding.
    ``where`` lists the prompts that differ in one of these ways, and the first place; ``oracle_different`` counts answers
    of transformers that differ from ours, of ``oracle_answers``.
    """
    different: list[dict[str, int]] = []
    oracle: list[bool] = []
    batches = range(0, len(prompts), BATCH)
    for first in track(batches, description=f"{'lossless in float32':<28}", transient=True):
        batch = prompts[first : first + BATCH]
        plain = speculative.generate(target, None, batch, max_new_tokens=tokens, vocabulary_size=ids).tokens
        shapes = [{"num_draft_tokens": length}, *({"tree": tree} for tree in trees)]
        options = {"max_new_tokens": tokens, "vocabulary_size": ids}
        fast = [speculative.generate(target, draft, batch, **options, **shape).tokens for shape in shapes]
        for place, (a, *others) in enumerate(zip(plain, *fast, strict=True), start=first):
            wrong = [i for b in others for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
            if wrong:
                different.append({"prompt": place, "first_difference": min(wrong)})
        if first == 0:
            for prompt, ours in list(zip(batch, plain, strict=True))[:ORACLE_PROMPTS]:
                for helper in helpers:
                    theirs = baselines.decode(target, list(prompt), tokens, Sampling(0.0), 0, helper, length, ids)
                    oracle.append(theirs.tokens != ours)
    return {
        "prompts": len(prompts),
        "different": len(different),
        "where": different,
        "draft_tokens": length,
        "trees": len(trees),
        "oracle_answers": len(oracle),
        "oracle_different": sum(oracle),
    }
