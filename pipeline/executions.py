"""What a store tells of executions that were: how they ended, and what they left.

It reads through whatever client it is given; which store that is, it does not know.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Failure:
    """An execution that did not end well; a ``defect`` is nothing that its user can mend."""

    overrides: str
    error: str
    defect: bool


@dataclass(frozen=True)
class Record:
    """What the store knows of an execution or a sweep; ``document`` is the JSON it left, if it came that far."""

    run_id: str
    name: str
    status: str
    overrides: str
    error: str
    metrics: dict[str, float]
    params: dict[str, str]
    document: dict[str, Any] | None


def below(client: Any, run_id: str) -> Iterator[Any]:
    """The runs right below a run, the newest first."""
    number = client.get_run(run_id).info.experiment_id
    wanted, order = f"tags.`mlflow.parentRunId` = '{run_id}'", ["attributes.start_time DESC"]
    page = client.search_runs([number], wanted, order_by=order)
    yield from page
    while page.token:
        page = client.search_runs([number], wanted, order_by=order, page_token=page.token)
        yield from page


def last_attempts(children: Iterable[Any]) -> list[Any]:
    """The newest run of each job among the ``children`` of a sweep (the newest first), the oldest first."""
    last: dict[str, Any] = {}
    for run in children:
        last.setdefault(run.data.tags.get("overrides", ""), run)
    return list(last.values())[::-1]


def failures(runs: Iterable[Any]) -> list[Failure]:
    """Those of the ``runs`` that failed."""
    tags = [run.data.tags for run in runs if run.info.status == "FAILED"]
    return [Failure(t["overrides"], t.get("error", ""), t.get("error_type") != "PipelineError") for t in tags]


def record(client: Any, run: Any, document: str) -> Record:
    """What there is about ``run``; ``document`` names the JSON artifact to read."""
    tags, content = run.data.tags, None
    if any(item.path == document for item in client.list_artifacts(run.info.run_id)):
        with tempfile.TemporaryDirectory() as folder:
            content = json.loads(Path(client.download_artifacts(run.info.run_id, document, folder)).read_text())
    told = (tags.get("overrides", ""), tags.get("error", ""))
    return Record(run.info.run_id, run.info.run_name, run.info.status, *told, run.data.metrics, run.data.params, content)
