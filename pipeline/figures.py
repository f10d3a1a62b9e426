"""The figures of the report, drawn from stored numbers. It computes nothing that is not in the tables."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.calibrate import costs_of
from pipeline.lossy import mark
from speculative.cost import Costs

BEFORE, AFTER, ACCENT = "#b8b8b8", "#2b6cb0", "#c05621"


def report(speculate: dict[str, Any], calibrate: dict[str, Any]) -> Figure:
    """Four panels: agreement (before distillation too, if it was measured), acceptance by position, costs, speed."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(2, 2)
    _agreement(axes[0, 0], speculate["by_temperature"])
    _positions(axes[0, 1], speculate["by_temperature"])
    _costs(axes[1, 0], costs_of(calibrate, float(next(iter(calibrate["by_temperature"])))))
    _speed(axes[1, 1], speculate["by_temperature"])
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def _agreement(axis: Axes, by_temperature: dict[str, Any]) -> None:
    labels, before, after = [], [], []
    for temperature, entry in by_temperature.items():
        for name, words in (("overlap", "overlap"), ("top1", "top-1")):
            labels.append(f"{words}\nT={temperature} text")
            before += [entry["before"][name]] if entry["before"] else []
            after.append(entry["after"][name])
    places = range(len(labels))
    if before:
        axis.bar([p - 0.2 for p in places], before, 0.4, color=BEFORE, label="before distillation")
    bars = axis.bar([p + 0.2 * bool(before) for p in places], after, 0.4, color=AFTER, label="after distillation")
    axis.bar_label(bars, fmt="%.2f", padding=2, fontsize=9)
    axis.set_xticks(list(places), labels, fontsize=9)
    axis.set_ylim(0, 1)
    axis.set_title("Agreement with the target, held-out text")
    axis.legend(frameon=False, fontsize=9)


def _positions(axis: Axes, by_temperature: dict[str, Any]) -> None:
    for (temperature, entry), colour in zip(by_temperature.items(), (AFTER, ACCENT, "#2f855a", "#6b46c1"), strict=False):
        rates = entry["by_position"]
        axis.plot(
            range(1, len(rates) + 1),
            rates,
            "o-",
            color=colour,
            label=f"T={temperature}{mark(entry)}, K={entry['draft_tokens']}",
        )
    longest = max(len(entry["by_position"]) for entry in by_temperature.values())
    axis.set_ylim(0, 1)
    axis.set_xlim(0.5, longest + 0.5)
    axis.set_xticks(range(1, longest + 1))
    axis.set_xlabel("position in the block")
    axis.set_title("P(accepted | all before it accepted)")
    axis.legend(frameon=False, fontsize=9)


def _costs(axis: Axes, costs: Costs) -> None:
    lengths = range(costs.longest + 1)
    draft = [costs.drafting(k) for k in lengths]
    verify = list(costs.verify)
    axis.bar(lengths, verify, color=AFTER, label="verification v(K+1)")
    axis.bar(lengths, draft, bottom=verify, color=ACCENT, label="drafting K·c")
    below = [a + b for a, b in zip(draft, verify, strict=True)]
    axis.bar(lengths, costs.other, bottom=below, color=BEFORE, label="all else o")
    axis.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axis.set_xticks(lengths)
    axis.set_xlabel("K, drafted tokens a round")
    axis.set_ylabel("plain steps")
    axis.set_title(f"Cost of a round (plain step: {costs.plain_seconds * 1e3:.1f} ms)")
    axis.legend(frameon=False, fontsize=9)


def _speed(axis: Axes, by_temperature: dict[str, Any]) -> None:
    highest = 1.0
    for (temperature, entry), colour in zip(by_temperature.items(), (AFTER, ACCENT, "#2f855a", "#6b46c1"), strict=False):
        predicted = [row["predicted"] for row in entry["prompts"]]
        measured = [row["plain_seconds"] / row["speculative_seconds"] for row in entry["prompts"]]
        highest = max(highest, *predicted, *measured)
        ratio = entry["ratio"]
        label = f"T={temperature}{mark(entry)}: {ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"
        axis.scatter(predicted, measured, s=22, color=colour, alpha=0.75, label=label)
    edge = highest * 1.08
    axis.plot([0, edge], [0, edge], color="black", linewidth=0.8)
    axis.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axis.set_xlim(0.4, edge)
    axis.set_ylim(0.4, edge)
    axis.set_xlabel("predicted ratio")
    axis.set_ylabel("measured ratio")
    axis.set_title("Speed: plain time ÷ speculative time, by prompt")
    axis.legend(frameon=False, fontsize=9, title="median [95 % interval]", title_fontsize=8)
