"""Stage report: alignment and speed side by side, as a picture, as text and as a page, in the output folder and in MLflow.

The stage's result is of this run alone, and so is its fingerprint. Which drafts to read it beside depends on what else was
distilled meanwhile: they are put into what is published, anew at every execution (see ``pipeline.beside``).
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline import beside, beside_table, card, drafters_page, figures, lossy, page, record, tables
from pipeline.beside import Neighbour
from pipeline.calibrate import suffix
from pipeline.choices import Stage
from pipeline.context import Context
from pipeline.proposer import words
from pipeline.tracking import Run
from speculative.waterfall import Waterfall

FORMAT = 4
FIGURE, TEXT = "report.png", "report.md"
CURVES = ("loss", "overlap", "forward_kl")


def identity(context: Context) -> dict[str, Any]:
    return {"target": context.target.name}


def run(context: Context, folder: Path, child: Run) -> tuple[dict[str, float], dict[str, Any]]:
    speculate, calibrate = context.parent(Stage.speculate), context.parent(Stage.calibrate)
    figures.report(speculate.details, calibrate.details).savefig(folder / FIGURE, dpi=130)
    (folder / TEXT).write_text(tables.markdown(tables.summary(context)))
    document = record.document(context, child.curves(context.parent(Stage.distil).run_id, CURVES))
    (folder / record.FILE).write_text(json.dumps(document))
    row = page.Row(1, words(document["draft"]), "FINISHED", "", document)
    command = card.command(context.overrides)
    (folder / page.FILE).write_text(page.render(f"Draft for {document['target']}", [row], command), encoding="utf-8")
    return _factors(context, document), {"figure": FIGURE, "text": TEXT, "page": page.FILE}


def _factors(context: Context, document: dict[str, Any]) -> dict[str, float]:
    """What each step from overlap to time multiplied the ratio by, as metrics."""
    metrics = {}
    for temperature, entry in document["by_temperature"].items():
        decoding = context.config.decoding
        end = suffix(float(temperature), decoding) + lossy.ending(decoding, float(temperature))
        factors = Waterfall(**entry["waterfall"]).factors
        metrics |= {f"waterfall/{step}{end}": factor for step, factor in factors.items()}
    return metrics


def publish(context: Context, run: Run) -> list[Neighbour]:
    """Put the report beside this execution's log and on its MLflow run, whether it was made now or before.

    Gives the drafts that were put beside this run's.
    """
    folder = context.parent(Stage.report).folder
    for name in (FIGURE, TEXT, page.FILE, record.FILE):
        shutil.copyfile(folder / name, context.output / name)
    if lines := beside.of(context):
        _put_beside(context.output, lines)
    if Stage.drafters in context.artifacts:  # it comes after the report, and not in every run
        shown = context.output / page.FILE
        compared = context.parent(Stage.drafters).details
        shown.write_text(drafters_page.added(shown.read_text(encoding="utf-8"), compared), encoding="utf-8")
    for name in (FIGURE, TEXT, page.FILE, record.FILE):
        run.file(context.output / name)
    details = context.parent(Stage.speculate).details["by_temperature"]
    marked = {
        temperature: {"temperature": temperature, "lossy": lossy.LABEL in entry} for temperature, entry in details.items()
    }
    rows = [{**row, **marked[temperature]} for temperature, entry in details.items() for row in entry["prompts"]]
    run.table({key: [row.get(key) for row in rows] for key in rows[0]}, "prompts.json")
    positions = [
        {**marked[temperature], "position": k, "accepted": rate}
        for temperature, entry in details.items()
        for k, rate in enumerate(entry["by_position"], start=1)
    ]
    run.table({key: [row[key] for row in positions] for key in positions[0]}, "acceptance_by_position.json")
    return lines


def _put_beside(output: Path, lines: list[Neighbour]) -> None:
    """Add the other drafts to the text, the page and the record in ``output``."""
    with (output / TEXT).open("a") as text:
        text.write("\n" + beside_table.markdown(lines))
    shown = output / page.FILE
    shown.write_text(page.with_beside(shown.read_text(encoding="utf-8"), lines), encoding="utf-8")
    kept = output / record.FILE
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {record.BESIDE: [asdict(line) for line in lines]}))
