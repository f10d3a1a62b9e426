"""What a stage is given: the configuration, the target, and the results of the stages before it."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pipeline.choices import Stage
from pipeline.config import Config
from pipeline.hardware import dtype_of
from pipeline.target import TargetFiles, resolve


@dataclass(frozen=True)
class Artifact:
    """A finished stage: its folder, fingerprint, headline ``metrics`` and other ``details``.

    ``run_id`` is its run in MLflow; ``draft`` the hash of the draft's files as they were when the stage began to read them.
    """

    stage: Stage
    folder: Path
    fingerprint: str
    metrics: dict[str, float]
    details: dict[str, Any]
    run_id: str | None = None
    draft: str | None = None


@dataclass
class Context:
    """What a stage may look at. The target is found when the first stage asks for it."""

    config: Config
    work: Path
    output: Path
    overrides: list[str] = field(default_factory=list)
    artifacts: dict[Stage, Artifact] = field(default_factory=dict)

    @cached_property
    def target(self) -> TargetFiles:
        return resolve(self.config.target, self.work, self.config.seed)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Number format of the target."""
        return dtype_of(self.config.target.precision, self.work)

    def parent(self, stage: Stage) -> Artifact:
        return self.artifacts[stage]
