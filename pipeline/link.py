"""The link between agreement and speed over drafts: how well it was predicted, and which measure tells it.

Numbers come from the documents of finished runs (see ``pipeline.record``), one for each draft and temperature.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

from pipeline.charts import Shown
from pipeline.statistics import correlation_interval, explained

PREDICTORS = ("overlap", "top1", "forward_kl", "reverse_kl", "jensen_shannon", "acceptance")
Interval = tuple[float, float, float]


def link(shown: Sequence[Shown], temperature: str) -> dict[str, float]:
    """How well speed and acceptance were predicted, over drafts."""
    entries = [draft.at(temperature) for draft in shown if temperature in draft.document["by_temperature"]]
    predicted, measured = [e["predicted"] for e in entries], [e["ratio"]["median"] for e in entries]
    errors = [abs(p - m) / m for p, m in zip(predicted, measured, strict=True)]
    return {
        "drafts": len(entries),
        "r2_speed": explained(predicted, measured),
        "median_abs_error_speed": median(errors),
        "median_abs_error_acceptance": median(abs(kept(e, "_predicted") - kept(e)) for e in entries),
    }


def kept(entry: dict[str, Any], end: str = "") -> float:
    """Drafts kept ÷ drafts that whole rounds hold: (tokens a round − 1) ÷ K; as counted, or as predicted."""
    return (entry[f"tokens_per_round{end}"] - 1) / entry["draft_tokens"]


def correlations(
    shown: Sequence[Shown], temperature: str, seed: int
) -> list[tuple[str, dict[str, tuple[float, float, float]]]]:
    """By predictor: Spearman and Pearson with acceptance and with speed, and 95 % intervals over drafts."""
    entries = [draft.at(temperature) for draft in shown if temperature in draft.document["by_temperature"]]
    known = {name: [e["alignment"][name] for e in entries] for name in PREDICTORS}
    known["predicted"] = [e["predicted"] for e in entries]
    outcomes = {"acceptance": [kept(e) for e in entries], "speed": [e["ratio"]["median"] for e in entries]}
    return [
        (
            name,
            {
                f"{kind} {outcome}": correlation_interval(values, found, kind == "Spearman", seed)
                for outcome, found in outcomes.items()
                for kind in ("Spearman", "Pearson")
            },
        )
        for name, values in known.items()
    ]


def slices(shown: Sequence[Shown], temperature: str) -> list[tuple[str, int, float, float]]:
    """By kind of prompt, over all drafts: (kind, timings, median ratio, median tokens a round)."""
    rows = [
        row for draft in shown if temperature in draft.document["by_temperature"] for row in draft.at(temperature)["prompts"]
    ]
    kinds = sorted({row["kind"] for row in rows})
    of = {kind: [row for row in rows if row["kind"] == kind] for kind in kinds}
    return [
        (kind, len(some), median(r["measured"] for r in some), median(r["tokens_per_round"] for r in some))
        for kind, some in of.items()
    ]


def agreement_by_kind(shown: Sequence[Shown], temperature: str) -> list[tuple[str, int, float]]:
    """By kind of prompt of held-out text, over all drafts: (kind, positions, median overlap as decoded)."""
    found: dict[str, list[dict[str, float]]] = {}
    for draft in shown:
        kinds = draft.at(temperature).get("kinds", {}) if temperature in draft.document["by_temperature"] else {}
        for kind, figures in kinds.items():
            found.setdefault(kind, []).append(figures)
    return [(kind, sum(int(f["positions"]) for f in some), median(f["overlap"] for f in some)) for kind, some in found.items()]
