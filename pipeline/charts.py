"""The charts of the page: one draft or many, agreement on the one axis and time on the other.

Drafts are told apart by their number in the page's table, so forty of them stay legible. A chart draws what documents
hold (see ``pipeline.record``) and computes nothing but medians and the prediction line.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline import lossy
from pipeline.figures import ACCENT, AFTER, BEFORE
from speculative.cost import Costs
from speculative.waterfall import STEPS, Waterfall, expected_tokens

FEW = 8  # drafts that may have a colour and a legend each
LEVELS = ("overlap\non text", "own\nprefixes", "later\npositions", "real\nrounds", "wall\nclock")
COLOURS = (AFTER, ACCENT, "#2f855a", "#6b46c1", "#b83280", "#00838f", "#8d6e00", "#555555")


@dataclass(frozen=True)
class Shown:
    """A draft that was decoded with: its number on the page, its name, its document."""

    number: int
    name: str
    document: dict[str, Any]

    def at(self, temperature: str) -> dict[str, Any]:
        return self.document["by_temperature"][temperature]

    def factors(self, temperature: str) -> dict[str, float]:
        return Waterfall(**self.at(temperature)["waterfall"]).factors

    def weakest(self, temperature: str) -> str:
        return Waterfall(**self.at(temperature)["waterfall"]).weakest


def temperatures(drafts: Sequence[Shown]) -> list[str]:
    """All that some draft was decoded at, in the order of the first."""
    return list(dict.fromkeys(t for draft in drafts for t in draft.document["by_temperature"]))


def _panels(drafts: Sequence[Shown], height: float, rows: int = 1) -> tuple[Figure, list[tuple[str, list[Axes]]]]:
    """A column of panels for each temperature."""
    names = temperatures(drafts)
    figure = Figure(figsize=(5.4 * max(len(names), 1), height), layout="constrained")
    axes = figure.subplots(rows, max(len(names), 1), squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, [(name, list(axes[:, place])) for place, name in enumerate(names)]


def _at(drafts: Sequence[Shown], temperature: str) -> list[Shown]:
    return [draft for draft in drafts if temperature in draft.document["by_temperature"]]


def _which(drafts: Sequence[Shown], temperature: str) -> str:
    """The temperature, and which of ``drafts`` were decoded with loss at it."""
    numbers = [str(draft.number) for draft in drafts if lossy.LABEL in draft.at(temperature)]
    which = "" if len(drafts) == 1 or not numbers else f": {', '.join(numbers)}"
    return f"T={temperature}" + (f" ({lossy.LABEL}{which})" if numbers else "")


def speed(drafts: Sequence[Shown]) -> Figure:
    """Overlap against measured speed with intervals and the line that costs predict; below, predicted against measured."""
    figure, panels = _panels(drafts, 8.6, rows=2)
    for temperature, (above, below) in panels:
        some = _at(drafts, temperature)
        overlaps = [draft.at(temperature)["alignment"]["acceptance"] for draft in some]
        _lines(above, some, temperature, max(overlaps))
        _measured(above, overlaps, some, temperature)
        above.set(
            xlabel="overlap, held-out text", ylabel="measured ratio", title=f"Overlap and speed, {_which(some, temperature)}"
        )
        above.legend(frameon=False, fontsize=8)
        predicted = [draft.at(temperature)["predicted"] for draft in some]
        _measured(below, predicted, some, temperature)
        edges = [*below.get_xlim(), *below.get_ylim()]
        below.plot([min(edges), max(edges)], [min(edges), max(edges)], color="black", linewidth=0.8)
        below.set(
            xlabel="predicted ratio", ylabel="measured ratio", title=f"Prediction and measurement, {_which(some, temperature)}"
        )
    return figure


def _measured(axis: Axes, places: list[float], drafts: list[Shown], temperature: str) -> None:
    """Points with 95 % intervals, numbered."""
    for place, draft in zip(places, drafts, strict=True):
        ratio = draft.at(temperature)["ratio"]
        below, above = ratio["median"] - ratio["low"], ratio["high"] - ratio["median"]
        bars = {"color": AFTER, "ecolor": "#9db8d6", "markersize": 4, "elinewidth": 1}
        axis.errorbar(place, ratio["median"], [[below], [above]], fmt="o", **bars)
        if len(drafts) > 1:
            axis.annotate(str(draft.number), (place, ratio["median"]), (3, 3), textcoords="offset points", fontsize=7)
    axis.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axis.margins(0.12)


def _lines(axis: Axes, drafts: list[Shown], temperature: str, highest: float) -> None:
    """Predicted ratio by overlap if all positions were alike, for each round that costs differently."""
    rounds = {(entry["draft_tokens"], round(_cost(entry), 3)) for entry in (draft.at(temperature) for draft in drafts)}
    overlaps = np.linspace(0, min(1.0, highest * 1.3 + 0.02), 60)
    for place, (length, cost) in enumerate(sorted(rounds)):
        label = f"predicted, K={length}, a round costs {cost:.2f}" if len(rounds) <= 3 else ("" if place else "predicted")
        ratios = [expected_tokens(overlap, length) / cost for overlap in overlaps]
        axis.plot(overlaps, ratios, color=ACCENT, linewidth=1, alpha=0.8 if len(rounds) <= 3 else 0.3, label=label or None)


def _cost(entry: dict[str, Any]) -> float:
    return Costs.stored(entry["costs"]).round(entry["draft_tokens"])


def positions(drafts: Sequence[Shown]) -> Figure:
    """P(draft k accepted | those before it were), by k."""
    figure, panels = _panels(drafts, 3.6)
    for temperature, [axis] in panels:
        some = _at(drafts, temperature)
        rates = [(draft, draft.at(temperature)["by_position"]) for draft in some]
        longest = max(len(row) for _, row in rates)
        _many(axis, [(draft, range(1, len(row) + 1), row) for draft, row in rates], "o-")
        axis.set_xlim(0.7, longest + 0.3)
        axis.set_xticks(range(1, longest + 1))
        axis.set_ylim(0, 1)
        axis.set(xlabel="position in the block", title=f"P(accepted | all before it accepted), {_which(some, temperature)}")
    return figure


def _many(axis: Axes, lines: list[tuple[Shown, Sequence[float], Sequence[float]]], style: str) -> None:
    """Lines with a legend if they are few, else thin ones."""
    few = len(lines) <= FEW
    for place, (draft, x, y) in enumerate(lines):
        colour = COLOURS[place % len(COLOURS)] if few else AFTER
        axis.plot(x, y, style, color=colour, markersize=3, linewidth=1.2, alpha=1.0 if few else 0.35, label=f"{draft.number}")
    if 1 < len(lines) <= FEW:
        axis.legend(frameon=False, fontsize=8, title="draft", title_fontsize=8, ncols=2)


def waterfall(drafts: Sequence[Shown]) -> Figure:
    """The way from overlap to time: the levels of one draft, or the factors of all."""
    figure, panels = _panels(drafts, 3.8)
    for temperature, [axis] in panels:
        some = _at(drafts, temperature)
        levels = np.array([list(draft.at(temperature)["waterfall"].values()) for draft in some])
        if len(some) == 1:
            _falls(axis, levels[0])
        else:
            _factors(axis, levels[:, 1:] / levels[:, :-1])
        axis.set_title(f"From overlap to time, {_which(some, temperature)}")
    return figure


def _falls(axis: Axes, levels: np.ndarray) -> None:
    places = range(len(levels))
    axis.bar([0, len(levels) - 1], levels[[0, -1]], 0.6, color=AFTER)
    for place in places[1:]:
        change = levels[place] - levels[place - 1]
        if place < len(levels) - 1:
            axis.bar(place, change, 0.6, bottom=levels[place - 1], color="#2f855a" if change >= 0 else ACCENT)
        axis.plot([place - 1, place], [levels[place - 1]] * 2, color=BEFORE, linewidth=1)
    for place, level in zip(places, levels, strict=True):
        axis.annotate(f"{level:.2f}", (place, max(level, levels[max(place - 1, 0)] if place < len(levels) - 1 else level)),
                      (0, 3), textcoords="offset points", ha="center", fontsize=8)  # fmt: skip
    axis.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axis.set_xticks(places, LEVELS, fontsize=8)
    axis.set_ylim(0, float(levels.max()) * 1.15)
    axis.set_ylabel("ratio")


def _factors(axis: Axes, factors: np.ndarray) -> None:
    spread = np.linspace(-0.18, 0.18, len(factors))
    for place in range(len(STEPS)):
        axis.scatter(place + spread, factors[:, place], s=12, color=AFTER, alpha=0.6)
        axis.hlines(np.median(factors[:, place]), place - 0.3, place + 0.3, color=ACCENT, linewidth=2)
    axis.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axis.set_xticks(range(len(STEPS)), STEPS, fontsize=9)
    axis.set_ylabel("factor (bar: median of drafts)")


def curves(drafts: Sequence[Shown]) -> Figure:
    """Training loss and validation overlap by step."""
    figure = Figure(figsize=(10.8, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, ending, title in zip(axes, ("loss", "overlap"), ("Training loss", "Overlap, validation text"), strict=True):
        lines = []
        for draft in drafts:
            found = [points for name, points in draft.document["curves"].items() if name.endswith(f"/{ending}")]
            lines += [(draft, *zip(*found[-1], strict=True))] if found else []
        _many(axis, lines, "-")
        axis.set(xlabel="step", title=title)
        axis.spines[["top", "right"]].set_visible(False)
        if not lines:
            axis.text(0.5, 0.5, "not in this store", ha="center", transform=axis.transAxes, color="#777777")
    return figure


def pareto(drafts: Sequence[Shown]) -> Figure:
    """Overlap against what a draft step costs; the line joins drafts that none beats in both."""
    figure, panels = _panels(drafts, 3.8)
    for temperature, [axis] in panels:
        points = sorted(
            (
                Costs.stored(draft.at(temperature)["costs"]).drafting(1),
                -draft.at(temperature)["alignment"]["acceptance"],
                draft.number,
            )
            for draft in _at(drafts, temperature)
        )
        best, front = 1.0, []
        for cost, negative, number in points:
            axis.annotate(str(number), (cost, -negative), (3, 3), textcoords="offset points", fontsize=7)
            if negative < best:
                best, front = negative, [*front, (cost, -negative)]
        axis.scatter([cost for cost, _, _ in points], [-negative for _, negative, _ in points], s=16, color=AFTER)
        axis.plot(*zip(*front, strict=True), color=ACCENT, linewidth=1)
        axis.margins(0.12)
        axis.set(xlabel="cost of a draft step, plain steps", ylabel="overlap", title=f"Overlap and cost, T={temperature}")
    return figure
