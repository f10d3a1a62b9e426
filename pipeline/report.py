"""Stage report: alignment and speed side by side, as a picture and as text, in the output folder and in MLflow."""

import shutil
from pathlib import Path
from typing import Any

from pipeline import figures, tables
from pipeline.config import Stage
from pipeline.context import Context
from pipeline.tracking import Run

FORMAT = 1
FIGURE, TEXT = "report.png", "report.md"


def identity(context: Context) -> dict[str, Any]:
    return {"target": context.target.name}


def run(context: Context, folder: Path, child: Run) -> tuple[dict[str, float], dict[str, Any]]:
    speculate, calibrate = context.parent(Stage.speculate), context.parent(Stage.calibrate)
    figures.report(speculate.details, calibrate.details).savefig(folder / FIGURE, dpi=130)
    (folder / TEXT).write_text(tables.markdown(tables.summary(context)))
    return {}, {"figure": FIGURE, "text": TEXT}


def publish(context: Context, run: Run) -> None:
    """Put the report beside this execution's log and on its MLflow run, whether it was made now or before."""
    folder = context.parent(Stage.report).folder
    for name in (FIGURE, TEXT):
        shutil.copyfile(folder / name, context.output / name)
        run.file(folder / name)
    details = context.parent(Stage.speculate).details["by_temperature"]
    rows = [{**row, "temperature": temperature} for temperature, entry in details.items() for row in entry["prompts"]]
    run.table({key: [row.get(key) for row in rows] for key in rows[0]}, "prompts.json")
    positions = [
        (temperature, k, rate) for temperature, entry in details.items() for k, rate in enumerate(entry["by_position"], start=1)
    ]
    columns = zip(*positions, strict=True)
    run.table(
        dict(zip(("temperature", "position", "accepted"), map(list, columns), strict=True)), "acceptance_by_position.json"
    )
