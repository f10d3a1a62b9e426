"""Which drafter is fastest on which kind of prompt, from the seconds and counts of every way on every prompt.

A way's ratio is the median over prompts of plain time ÷ its time. "Wins" means that both intervals, over plain decoding
and over the next best way on the same prompts, lie above 1; all else is said as what it is. Few prompts have no interval
that could tell. Pure; it knows no model.
"""

from collections.abc import Sequence
from typing import Any

from pipeline import lossy
from pipeline.statistics import FEWEST, median_interval
from speculative.metrics import total

ALL, PLAIN = "all prompts", "none"
LEGEND = (
    "Each cell: speed ratio to plain decoding, median over prompts [95 % bootstrap interval], then tokens a round. "
    f"Of fewer than {FEWEST} prompts the interval covers less than it says. "
    "All ways decoded each prompt one after the other. Memory is what a way adds to the target, in MiB: weights, their packed "
    "copies, and its own keys and values for the longest text here; training is wall time on this machine."
)


def summarise(rows: Sequence[dict[str, Any]], names: Sequence[str], seed: int) -> dict[str, Any]:
    """Figures by kind, the last of all prompts.

    ``rows`` have ``kind`` and by the name of each way ``seconds`` (by name) and ``acceptance`` (by name).
    """
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    groups = {kind: [row for row in rows if row["kind"] == kind] for kind in kinds} | {ALL: list(rows)}
    return {kind: _kind(group, names, seed) for kind, group in groups.items()}


def _kind(rows: Sequence[dict[str, Any]], names: Sequence[str], seed: int) -> dict[str, Any]:
    figures = {
        name: {
            "tokens_per_round": total(row["acceptance"][name] for row in rows).tokens_per_round,
            "ratio": _ratio(rows, PLAIN, name, seed),
        }
        for name in names
    }
    drafting = sorted((name for name in names if name != PLAIN), key=lambda name: -figures[name]["ratio"]["median"])
    best, *others = drafting
    margin = _ratio(rows, others[0], best, seed) if others else None
    return {"prompts": len(rows), "ways": figures, "best": best, "next": others[0] if others else None, "margin": margin}


def _ratio(rows: Sequence[dict[str, Any]], above: str, below: str, seed: int) -> dict[str, float]:
    values = [row["seconds"][above] / row["seconds"][below] for row in rows]
    return dict(zip(("median", "low", "high"), median_interval(values, seed), strict=True))


def verdict(figures: dict[str, Any]) -> str:
    """Who wins on one kind of prompt, in a sentence."""
    best, ratio, margin = figures["best"], figures["ways"][figures["best"]]["ratio"], figures["margin"]
    if figures["prompts"] < FEWEST:
        return f"too few prompts to tell ({figures['prompts']}; it takes {FEWEST}); {best} comes first, {_interval(ratio)}"
    if ratio["low"] <= 1:
        return f"no drafter is shown to beat plain decoding; {best} comes nearest, {_interval(ratio)}"
    if margin is None or margin["low"] > 1:
        return f"{best} wins, {_interval(ratio)}"
    return f"{best} leads, {_interval(ratio)}, but is not shown to be faster than {figures['next']}"


def verdict_rows(details: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and sentence for each kind of prompt at each temperature."""
    return [
        (f"{kind} T={temperature}{lossy.mark(entry)}", verdict(figures))
        for temperature, entry in details["by_temperature"].items()
        for kind, figures in entry["kinds"].items()
    ]


def table(entry: dict[str, Any]) -> list[list[str]]:
    """The header and a line for each way, at one temperature."""
    kinds = entry["kinds"]
    header = ["drafter", "set to", "memory added", "training", *(f"{kind} ({kinds[kind]['prompts']})" for kind in kinds)]
    return [header, *([*_facts(way), *(_cell(kinds[kind]["ways"][way["name"]]) for kind in kinds)] for way in entry["ways"])]


def _facts(way: dict[str, Any]) -> list[str]:
    memory = f"{way['bytes'] / 2**20:.1f}" if way["bytes"] else "–"
    seconds = way["training_seconds"] if way["bytes"] else None
    return [way["name"], way["words"], memory, "–" if seconds is None else f"{seconds / 60:.0f} min"]


def _cell(figures: dict[str, Any]) -> str:
    return f"{_interval(figures['ratio'])}; {figures['tokens_per_round']:.2f}"


def _interval(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def lossless(entry: dict[str, Any]) -> str:
    """What a greedy race says of losslessness; nothing is compared above temperature 0."""
    if entry["different"] is None:
        return ""
    return f"Of {entry['compared']} greedy outputs {entry['different']} differ from plain decoding's."


def notes(entry: dict[str, Any]) -> str:
    """What is not in the figures, and what may be in them that should not."""
    short = f"{entry['left_out']} more prompts had answers too short to be timed." if entry["left_out"] else ""
    return f"{short} {entry['foreign']}".strip()


def markdown(details: dict[str, Any]) -> str:
    """The tables, and who wins where."""
    parts = []
    for temperature, entry in details["by_temperature"].items():
        header, *lines = table(entry)
        rows = [
            "| " + " | ".join(cell.replace("|", "/") for cell in line) + " |"
            for line in (header, ["---"] * len(header), *lines)
        ]
        mark = lossy.mark(entry)
        verdicts = [f"- {kind}{mark}: {verdict(figures)}." for kind, figures in entry["kinds"].items()]
        loss = f"**Lossy:** {lossy.words(entry[lossy.LABEL])}." if mark else ""
        title = f"## Drafters at temperature {temperature}{mark}"
        parts += [title, loss, "\n".join(rows), "\n".join(verdicts), lossless(entry), notes(entry)]
    return "\n\n".join([part for part in parts if part] + [LEGEND]) + "\n"


def metrics(entry: dict[str, Any], end: str) -> dict[str, float]:
    """Figures over all prompts, by way; of a lossy rule also how far the texts are from the target, see ``lossy.metrics``."""
    found = {}
    bounds = entry[lossy.LABEL]["at_least"] if lossy.LABEL in entry else {}
    for name, figures in entry["kinds"][ALL]["ways"].items():
        way = name.replace(", ", "_").replace(" ", "_")
        if name in bounds:
            found[f"drafters/{way}/total_variation_at_least{end}"] = bounds[name]["mean"]
        found[f"drafters/{way}/tokens_per_round{end}"] = figures["tokens_per_round"]
        found |= {
            f"drafters/{way}/ratio{part}{end}": figures["ratio"][key]
            for part, key in (("", "median"), ("_low", "low"), ("_high", "high"))
        }
    return found
