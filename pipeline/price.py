"""What a draft with a trimmed vocabulary pays in engines that want a logit for each of the target's tokens.

Its head is widened for them: a step reads more bytes and proposes no more tokens. Measured in transformers' assisted
generation, and reckoned against a draft of the whole vocabulary, whose step would cost them the same. It decodes nothing.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

from pipeline.draft import Shape
from speculative.cost import Costs, expected_tokens

WORTH = 1.01  # ratio from which on the whole vocabulary is called better


def measured(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Counts and medians over prompts, decoded by transformers alone and assisted; seconds are those of forwards alone.

    ``rows``: new_tokens, and seconds of each forward of the target alone (transformers_forwards), of the target assisted
    (assisted_forwards: one a round, the first reads the prompt) and of the draft (drafting_forwards: one a drafted token).
    ``draft_step`` is a forward of the draft in units of one of the target alone.
    """
    rounds = sum(len(row["assisted_forwards"]) for row in rows)
    proposed = sum(len(row["drafting_forwards"]) for row in rows)
    emitted = sum(row["new_tokens"] for row in rows)
    plain = median(seconds for row in rows for seconds in row["transformers_forwards"])
    step = median(seconds for row in rows for seconds in row["drafting_forwards"])
    return {
        "rounds": rounds,
        "proposed": proposed,
        "accepted": emitted - rounds,
        "acceptance_rate": (emitted - rounds) / proposed,
        "tokens_per_round": emitted / rounds,
        "plain_step_seconds": plain,
        "draft_step_seconds": step,
        "draft_step": step / plain,
    }


def beside(stock: dict[str, float], costs: Costs) -> dict[str, float]:
    """The same with the step of the trimmed draft in the engine here, drawing included, as calibration found it."""
    return stock | {"draft_step_here": costs.draft, "draft_step_seconds_here": costs.draft * costs.plain_seconds}


def whole_vocabulary(
    shape: Shape, rows: int, coverage: float, overlap: float, drafts: int, bytes_each: int
) -> dict[str, float]:
    """What a draft of all ``rows`` tokens would be to a stock engine, where this one covers a share of the text.

    Taken for granted: of the text that is not covered it would be right as often as of the rest, which flatters it, for
    what is left out is rare. With ``overlap`` α at each of K = ``drafts`` places a round has 1 + α + … + α^K tokens; both
    drafts' steps read as many bytes there, so the ratio of these is the ratio of speeds.
    """
    of_both = [expected_tokens(rate, drafts) for rate in (overlap, min(overlap / coverage, 1.0))]
    return {
        "head_bytes": rows * shape.width * bytes_each,
        "head_bytes_here": shape.head * bytes_each,
        "tokens_per_round_trimmed": of_both[0],
        "tokens_per_round_whole": of_both[1],
        "ratio": of_both[1] / of_both[0],
    }


def text(stock: dict[str, Any], drafts: int) -> str:
    """A sentence on the reckoning, from what ``whole_vocabulary`` gave."""
    found = stock["whole_vocabulary"]
    better = "would serve such engines better" if found["ratio"] >= WORTH else "would serve such engines little better"
    return (
        f"In engines that want a logit for every token the head reads {found['head_bytes'] / 1e6:.1f} MB a step "
        f"({found['head_bytes_here'] / 1e6:.1f} MB in Draftsmith's), as much as a draft of the whole vocabulary would, which "
        f"{better}: by reckoning up to {found['tokens_per_round_whole']:.2f} tokens a round in place of "
        f"{found['tokens_per_round_trimmed']:.2f} at K = {drafts}, {found['ratio']:.3f}× the speed"
    )
