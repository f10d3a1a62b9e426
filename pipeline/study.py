"""``python -m pipeline.study SWEEP``: the page of a finished sweep (or run), read from the MLflow store alone.

SWEEP is the beginning of a run's id, or ``last``. The page is written where ``--to`` says, and beside the sweep's run.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline import page, record, tracking
from pipeline.config import Tracking
from pipeline.errors import PipelineError
from pipeline.page import Row
from pipeline.tracking import Record


def rows_of(records: Sequence[Record]) -> list[Row]:
    """Numbered from 1, and named by what sets each apart from the others."""
    names = distinct([found.overrides or found.name for found in records])
    return [
        Row(number, name, found.status, found.error, found.document)
        for number, (name, found) in enumerate(zip(names, records, strict=True), start=1)
    ]


def distinct(overrides: Sequence[str]) -> list[str]:
    """The overrides of each without those that all have; the whole of them where nothing is left."""
    parts = [text.split() for text in overrides]
    shared = set.intersection(*map(set, parts)) if len(parts) > 1 else set()
    return [" ".join(part for part in some if part not in shared) or " ".join(some) or "default" for some in parts]


def make(config: Tracking, work: Path, wanted: str, folder: Path | None) -> tuple[Path, list[Row]]:
    """Write the page of a sweep into ``folder`` (default: ``work``/studies/ID) and put it on the sweep's run.

    Raises:
        PipelineError: there is no such sweep, or none of its jobs decoded anything.
    """
    run, records = tracking.read(config, work, wanted, record.FILE)
    rows = rows_of(records)
    if not page.measured(rows):
        raise PipelineError(f"{wanted}: no run of it reached the report stage; give stages up to `report`")
    folder = folder or work / "studies" / run.run_id
    folder.mkdir(parents=True, exist_ok=True)
    shown = page.measured(rows)
    for name, (draw, _) in page.charts_of(shown).items():
        draw(shown).savefig(folder / f"{name}.png", dpi=130)
        run.file(folder / f"{name}.png")
    path = folder / page.FILE
    path.write_text(page.render(run.name(), rows, f"python -m pipeline.study {run.run_id}"), encoding="utf-8")
    run.file(path)
    return path, rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.study", description=__doc__)
    parser.add_argument("sweep", help="the id of a sweep or an execution, its beginning, or `last`")
    parser.add_argument("--work", type=Path, default=Path("outputs"), help="paths.work of the sweep (default: outputs)")
    parser.add_argument("--uri", help="tracking.uri of the sweep (default: the SQLite store under --work)")
    parser.add_argument("--experiment", default=Tracking().experiment, help="tracking.experiment of the sweep")
    parser.add_argument("--to", type=Path, help="a folder for the page")
    given = parser.parse_args(arguments)
    try:
        if given.uri is None and not (given.work / "mlflow.db").is_file():
            raise PipelineError(f"--work={given.work}: no store there; give paths.work of the sweep, or --uri")
        path, rows = make(Tracking(uri=given.uri, experiment=given.experiment), given.work.resolve(), given.sweep, given.to)
    except PipelineError as error:
        sys.exit(f"draftsmith: {error}")
    sys.stdout.write(f"{len(rows)} drafts, {len(page.measured(rows))} measured: {path}\n")


if __name__ == "__main__":
    main()
