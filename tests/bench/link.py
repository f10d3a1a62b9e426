"""The link between agreement and speed over a finished sweep: ``python -m tests.bench.link SWEEP [--work outputs]``.

Prints, at each temperature, how well speed and acceptance were predicted, which measure of agreement tells them, and
which step lost or won what a prediction missed; then one line of JSON, whose figures are those of the worst temperature:
drafts at different temperatures together would look better predicted than they are.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from mlflow.tracking import MlflowClient

from pipeline import charts, page, record, study, tracking
from pipeline.charts import Shown
from pipeline.config import Tracking
from pipeline.errors import PipelineError
from pipeline.executions import Record
from pipeline.link import PREDICTORS, correlations, link

TOLERANCE = 0.07  # relative error of a predicted speed ratio that is called a miss


def figures(shown: Sequence[Shown], seed: int = 0) -> dict[str, Any]:
    """The JSON; the best predictor has the largest |Spearman| with speed, averaged over temperatures."""
    temperatures = charts.temperatures(shown)
    links = [link(shown, temperature) for temperature in temperatures]
    strengths: dict[str, list[float]] = {name: [] for name in PREDICTORS}
    for temperature in temperatures:
        for name, found in correlations(shown, temperature, seed):
            if name in strengths:
                strengths[name].append(abs(found["Spearman speed"][0]))
    known = {name: mean(values) for name, values in strengths.items() if all(map(math.isfinite, values))}
    return {
        "drafts": min(found["drafts"] for found in links),
        "r2_speed": min(found["r2_speed"] for found in links),
        "median_abs_error_speed": max(found["median_abs_error_speed"] for found in links),
        "median_abs_error_acceptance": max(found["median_abs_error_acceptance"] for found in links),
        "best_predictor_of_speed": max(known, key=known.__getitem__) if known else None,
    }


def culprit(draft: Shown, temperature: str) -> tuple[float, str]:
    """How far measured lies from predicted, relative, and the step of the waterfall that went furthest the same way."""
    entry = draft.at(temperature)
    miss = entry["ratio"]["median"] / entry["predicted"] - 1
    factors = draft.factors(temperature)
    return miss, (max if miss > 0 else min)(factors, key=factors.__getitem__)


def table(shown: Sequence[Shown], seed: int = 0) -> str:
    lines = []
    for temperature in charts.temperatures(shown):
        found = link(shown, temperature)
        lines.append(
            f"T={temperature}: {found['drafts']} drafts, R² of speed {found['r2_speed']:.3f}, median error of speed "
            f"{found['median_abs_error_speed']:.1%}, of acceptance {found['median_abs_error_acceptance']:.3f}"
        )
        for name, values in correlations(shown, temperature, seed):
            cells = (f"{column} {value:+.2f} [{low:+.2f}, {high:+.2f}]" for column, (value, low, high) in values.items())
            lines.append(f"  {name:<15} {'   '.join(cells)}")
        for draft in (draft for draft in shown if temperature in draft.document["by_temperature"]):
            miss, step = culprit(draft, temperature)
            entry = draft.at(temperature)
            why = f", furthest at {step} (×{draft.factors(temperature)[step]:.2f})" if abs(miss) > TOLERANCE else ""
            lines.append(
                f"  #{draft.number} {draft.name}: predicted {entry['predicted']:.2f}, measured "
                f"{entry['ratio']['median']:.2f} ({miss:+.1%}{why})"
            )
    return "\n".join(lines)


def foretold(client: MlflowClient, job: Record) -> bool | None:
    """Whether the predictions that are compared were logged before anything was measured; None if another job decoded.

    Asks the history of the metrics on the job's own speculate stage, each temperature for itself.
    """
    number = client.get_run(job.run_id).info.experiment_id
    wanted = f"tags.`mlflow.parentRunId` = '{job.run_id}' and tags.stage = 'speculate'"
    stages = client.search_runs([number], wanted)
    if not stages:
        return None
    run_id = stages[0].info.run_id
    assert job.document is not None
    for place, (temperature, entry) in enumerate(job.document["by_temperature"].items()):
        end = f"_at_{temperature}" if place else ""
        predicted = client.get_metric_history(run_id, f"speed/ratio_predicted{end}")
        measured = client.get_metric_history(run_id, f"speed/ratio{end}")
        if not predicted or not measured or any(point.value != entry["predicted"] for point in predicted):
            return False
        if min(point.timestamp for point in predicted) >= min(point.timestamp for point in measured):
            return False
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.link", description=__doc__)
    parser.add_argument("sweep")
    parser.add_argument("--work", type=Path, default=Path("outputs"))
    given = parser.parse_args(arguments)
    try:
        run, records = tracking.read(Tracking(), given.work.resolve(), given.sweep, record.FILE)
    except PipelineError as error:
        sys.exit(str(error))
    shown = page.measured(study.rows_of(records))
    if not shown:
        sys.exit(f"{given.sweep}: no job of it was measured")
    order = [foretold(run.client, job) for job in records if job.document is not None]
    after = order.count(False)
    sys.stdout.write(
        f"{table(shown)}\npredictions logged before decoding: {order.count(True)} of {len(order)} drafts, {after} after, "
        f"{order.count(None)} decoded by an earlier job\n{json.dumps(figures(shown))}\n"
    )
    if after:
        sys.exit(1)


if __name__ == "__main__":
    main()
