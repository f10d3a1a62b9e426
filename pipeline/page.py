"""One self-contained HTML page for a run or a sweep: figures inside, no script, nothing fetched.

Rows are drafts, whether they came to an end or not; numbers stand for them in the charts. Names and errors are other
people's text: the template escapes them.
"""

import base64
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from matplotlib.figure import Figure

from pipeline import beside_table, card, charts, lossy, record
from pipeline.beside import Neighbour
from pipeline.charts import Shown
from pipeline.link import agreement_by_kind, correlations, link, slices

FILE = "report.html"
PLACE = '<div id="beside"></div>'  # of the drafts beside a run's own
WORDS = {
    "overlap": "overlap at the reference temperature",
    "top1": "top-1 agreement",
    "forward_kl": "forward KL",
    "reverse_kl": "reverse KL",
    "jensen_shannon": "Jensen–Shannon",
    "acceptance": "overlap as decoded",
    "predicted": "predicted ratio",
}
Draw = Callable[[Sequence[Shown]], Figure]
CHARTS: dict[str, tuple[Draw, str]] = {
    "speed": (charts.speed, "Overlap against speed. Bars are 95 % bootstrap intervals over prompts."),
    "positions": (charts.positions, "Acceptance by position in the drafted block, as counted while decoding."),
    "waterfall": (
        charts.waterfall,
        "From teacher-forced overlap to measured time. prefixes: text → what decoding itself wrote; positions: the first "
        "drafted token → all that were judged; independence → what rounds really kept; operations → wall clock, "
        "reading the prompt included.",
    ),
    "pareto": (charts.pareto, "Overlap against the cost of a draft step; the line joins drafts that none beats in both."),
    "curves": (charts.curves, "Training loss and overlap on validation text."),
}


@dataclass(frozen=True)
class Row:
    """A draft on the page: its number, name and end; ``document`` if it was decoded with (see ``pipeline.record``)."""

    number: int
    name: str
    status: str
    error: str
    document: dict[str, Any] | None


def measured(rows: Sequence[Row]) -> list[Shown]:
    """The drafts that were decoded with."""
    return [Shown(row.number, row.name, row.document) for row in rows if row.document is not None]


def charts_of(shown: Sequence[Shown]) -> dict[str, tuple[Draw, str]]:
    """The charts that say something about these drafts."""
    return {name: chart for name, chart in CHARTS.items() if len(shown) > (1 if name == "pareto" else 0)}


def render(title: str, rows: Sequence[Row], command: str, seed: int = 0) -> str:
    """The page."""
    shown = measured(rows)
    temperatures = charts.temperatures(shown)
    text = _template("page.html").render(
        title=title,
        command=command,
        rows=rows,
        shown=shown,
        temperatures=temperatures,
        figures=[(name, _embedded(draw(shown)), caption) for name, (draw, caption) in charts_of(shown).items()],
        links=[(t, link(shown, t)) for t in temperatures],
        correlations=[(t, correlations(shown, t, seed)) for t in temperatures] if len(shown) > 2 else [],
        kinds=[(t, found) for t in temperatures if (found := agreement_by_kind(shown, t))],
        slices=[(t, slices(shown, t)) for t in temperatures],
        words=WORDS,
        mark=lossy.mark,
        loss=[
            (draft.number, temperature, lossy.words(found))
            for draft in shown
            for temperature, found in lossy.of(draft.document["by_temperature"]).items()
        ],
    )
    alone = shown[0].document if len(shown) == len(rows) == 1 else {}
    return with_beside(text, [Neighbour(**line) for line in alone.get(record.BESIDE, [])])


def with_beside(text: str, lines: Sequence[Neighbour]) -> str:
    """The page ``text`` of one run with the drafts beside its own; what of a command may be private is not shown."""
    if not lines:
        return text
    command = beside_table.command(card.shareable(beside_table.missing(lines))) if beside_table.missing(lines) else ""
    tables = _template("beside.html").render(table=beside_table.table(lines), notes=beside_table.notes(lines), command=command)
    return text.replace(PLACE, tables, 1)


def _template(name: str) -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["number"] = _number
    return environment.get_template(name)


def _embedded(figure: Figure) -> str:
    """The figure as a data URI."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def _number(value: float, digits: int = 2) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"
