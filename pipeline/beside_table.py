"""The table of the drafts beside a run's own, for a terminal, as Markdown, and cell by cell for a page.

All say the same. Commands are quoted for a shell; whether a reader may see all of one, the caller knows.
"""

import shlex
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline import lossy
from pipeline.beside import TWIN, Neighbour


def command(arguments: Sequence[str]) -> str:
    """The command with ``arguments``, quoted for a shell."""
    return " ".join(["python -m pipeline", *map(shlex.quote, arguments)])


def table(lines: Sequence[Neighbour]) -> list[list[str]]:
    """The header, and a row for each line."""
    at = sorted({t for line in lines for t in (*line.validation, *line.test, *line.measured)}, key=float)
    each = _each([f"T={t}" for t in at])
    agreement = [f"{name}, {text} text, {each}" for text in ("validation", "test") for name in ("overlap", "top-1")]
    header = ["draft", *agreement, "estimated ratio", "best step", "read a step", f"measured ratio, {each}"]
    return [header, *(_cells(line, at) for line in lines)]


def _cells(line: Neighbour, at: Sequence[str]) -> list[str]:
    agreement = [
        _each([f"{found[t][name]:.3f}" if name in found.get(t, {}) else "–" for t in at])
        for found in (line.validation, line.test)
        for name in ("overlap", "top1")
    ]
    ratios = _each([_words(line.measured[t]) if t in line.measured else "–" for t in at])
    return [
        line.name,
        *agreement,
        "–" if line.ratio_estimated is None else f"{line.ratio_estimated:.2f}",
        "–" if line.best_step is None else f"{line.best_step} of {line.steps}",
        "–" if line.read_per_step is None else f"{line.read_per_step / 1e6:.1f} M",
        ratios if line.alike else f"{ratios} *",
    ]


def _each(texts: Sequence[str]) -> str:
    return "–" if set(texts) <= {"–"} else " · ".join(texts)


def _words(ratio: dict[str, Any]) -> str:
    mark = f" ({lossy.LABEL})" if ratio["lossy"] else ""
    return f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]{mark}"


def notes(lines: Sequence[Neighbour]) -> list[str]:
    """What the table does not say, in sentences; the command for a missing draft is ``missing``'s."""
    before, this, twin, best = lines
    said = [] if before.test else ["The undistilled draft was not measured; decoding.baselines=true does it."]
    if twin.draft == this.draft:
        said.append("This draft was trained by cross-entropy alone.")
    elif twin.draft is None and not twin.arguments:
        said.append("codec=auto made this cache for one objective; name a codec to train by cross-entropy alone from the same.")
    elif twin.draft is None:
        said.append("No draft like this was trained by cross-entropy alone from this cache; the command below does it.")
    if best.draft == this.draft:
        said.append("No draft from this cache has a higher estimated ratio than this one.")
    else:
        said.append(f"The best so far is {best.draft}; from this draft to it: {'; '.join(best.differs)}.")
    return said + ([] if all(line.alike for line in lines) else ["* with other decoding settings or on another machine."])


def missing(lines: Sequence[Neighbour]) -> list[str]:
    """The arguments of the command that makes what is missing; none if nothing is, or nothing can."""
    return next((line.arguments for line in lines if line.name == TWIN), [])


def markdown(lines: Sequence[Neighbour]) -> str:
    """The table, what it does not say, and the command."""
    header, *rows = [[cell.replace("|", "/") for cell in row] for row in table(lines)]
    text = "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))
    listed = "\n".join(f"- {note}" for note in notes(lines))
    lacking = missing(lines)
    return f"## Beside this draft\n\n{text}\n\n{listed}\n" + (f"\n```console\n{command(lacking)}\n```\n" if lacking else "")


def show(lines: Sequence[Neighbour]) -> None:
    """Print the table, what it does not say, and the command in a line of its own, to be copied."""
    console = Console()
    header, *rows = table(lines)
    shown = Table(*header, title="Beside this draft", title_justify="left", pad_edge=False)
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
    for note in notes(lines):
        console.print(note, markup=False, highlight=False)
    if lacking := missing(lines):
        console.print(command(lacking), markup=False, highlight=False, soft_wrap=True)
