"""What one finished execution says about alignment and speed, as one JSON document.

The page of a run is drawn from one document, the page of a sweep from those of its jobs: the results of stages that
jobs share are in each. It computes nothing but the way from overlap to time.
"""

from dataclasses import asdict
from typing import Any

from pipeline import lossy
from pipeline.calibrate import costs_of
from pipeline.choices import Stage
from pipeline.context import Context
from speculative.metrics import Acceptance
from speculative.waterfall import waterfall

FILE = "record.json"
BESIDE = "beside"  # what a published record also has: the drafts of ``pipeline.beside``


def document(context: Context, curves: dict[str, list[tuple[int, float]]]) -> dict[str, Any]:
    """The document of a context that has reached the speculate stage; ``curves`` are (step, value) by name."""
    distil, speculate = context.parent(Stage.distil).details, context.parent(Stage.speculate).details
    calibrate = context.parent(Stage.calibrate).details
    return {
        "target": context.target.name,
        "precision": str(context.dtype).removeprefix("torch."),
        "machine": calibrate["machine"],
        "draft": {**distil["shape"], "vocabulary_coverage": distil["vocabulary_coverage"]},
        "training": {key: distil[key] for key in ("train_positions", "epochs", "best_step")},
        "curves": curves,
        "lossless": speculate["lossless"],
        "by_temperature": {
            temperature: _entry(entry, calibrate, temperature) for temperature, entry in speculate["by_temperature"].items()
        },
    }


def _entry(entry: dict[str, Any], calibrate: dict[str, Any], temperature: str) -> dict[str, Any]:
    """One temperature: what was known before decoding, what was counted and timed, and the way between them."""
    costs, drafts = costs_of(calibrate, float(temperature)), entry["draft_tokens"]
    counts = Acceptance(tuple(map(tuple, entry["rounds"])), entry["emitted"])
    measured = entry["ratio"]["median"]
    kept = ("before", "draft_tokens", "predicted", "acceptance_rate", "tokens_per_round", "by_position", "ratio")
    parts = {part: entry[part] for part in ("tree", lossy.LABEL, "kinds") if part in entry}
    return {
        **{key: entry[key] for key in kept},
        **parts,
        "alignment": entry["after"],
        "tokens_per_round_predicted": entry["tokens_per_round_predicted"],
        "costs": asdict(costs),
        "break_even_overlap": calibrate["by_temperature"][temperature]["break_even_overlap"],
        "waterfall": asdict(waterfall(entry["after"]["acceptance"], counts, costs, drafts, measured)),
        "prompts": [
            {
                "kind": row["kind"],
                "predicted": row["predicted"],
                "measured": row["plain_seconds"] / row["speculative_seconds"],
                "tokens_per_round": row["tokens_per_round"],
            }
            for row in entry["prompts"]
        ],
    }
