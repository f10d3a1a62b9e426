"""How long a result took to make, from the runs that made it: one that was broken off counts as far as it logged anything."""

from typing import Any

from pipeline.tracking import Run


def seconds(run: Run, fingerprint: str) -> float:
    """Wall seconds of all runs of the result with this fingerprint, in the store of ``run``; NaN if there are none."""
    experiment = run.client.get_run(run.run_id).info.experiment_id
    found = run.client.search_runs([experiment], f"tags.fingerprint = '{fingerprint}'")
    return sum(_milliseconds(run, one) for one in found) / 1000 if found else float("nan")


def _milliseconds(run: Run, one: Any) -> int:
    if one.info.status == "FINISHED":
        return one.info.end_time - one.info.start_time
    logged = [run.client.get_metric_history(one.info.run_id, name)[-1].timestamp for name in one.data.metrics]
    return max(logged, default=one.info.start_time) - one.info.start_time
