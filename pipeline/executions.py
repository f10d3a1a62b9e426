"""What a store tells of executions that were: how they ended, and what they left. It does not know which store."""

from dataclasses import dataclass
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
