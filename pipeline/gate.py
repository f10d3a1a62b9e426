"""The evidence gate: what a draft must have shown, on this run's own figures, before it leaves the house.

Each check is one figure beside its threshold. The gate decides nothing by itself about a draft that fails while it is
off: it writes the same evidence and says that it was off. It reads results of other stages and measures nothing.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedConfig

from pipeline import lossy
from pipeline.config import Export
from pipeline.errors import PipelineError
from pipeline.statistics import FEWEST

MIB = 2**20


@dataclass(frozen=True)
class Check:
    """One figure. ``key`` is the threshold's; ``at`` the decoding temperature, None where there is none."""

    key: str
    figure: str
    at: str | None
    value: float
    threshold: float
    passed: bool

    @property
    def shortfall(self) -> str:
        """The figure, its threshold and the distance between them, in words."""
        place = "" if self.at is None else f" at temperature {self.at}"
        gap = abs(self.value - self.threshold)
        return (
            f"{self.figure}{place} is {self.value:.4g}, {gap:.2g} {'above' if self.value > self.threshold else 'below'} "
            f"{self.key}={self.threshold:g}"
        )


def checks(export: Export, measured: dict[str, Any], memory: float) -> list[Check]:
    """Every figure beside its threshold; ``measured`` are the details of stage speculate, ``memory`` is in MiB."""
    return [*_by_temperature(export, measured), *_once(export, measured, memory)]


def _by_temperature(export: Export, measured: dict[str, Any]) -> Iterator[Check]:
    for temperature, entry in measured["by_temperature"].items():
        for key, figure, value, threshold in (
            ("export.minimum_overlap", "overlap", entry["after"]["overlap"], export.minimum_overlap),
            (
                "export.minimum_ratio",
                f"lower end of the speed ratio{lossy.mark(entry)}",
                entry["ratio"]["low"],
                export.minimum_ratio,
            ),
        ):
            yield Check(key, figure, temperature, value, threshold, bool(value >= threshold))  # NaN passes nothing
        if export.minimum_ratio > 0:  # of fewer prompts the lower end is no evidence
            timed = len(entry["prompts"])
            yield Check("decoding.prompts", "number of prompts timed", temperature, timed, FEWEST, timed >= FEWEST)


def _once(export: Export, measured: dict[str, Any], memory: float) -> Iterator[Check]:
    if export.lossless:
        lossless = measured["lossless"]
        unequal = lossless["different"] + lossless["oracle_different"]
        yield Check("export.lossless", "number of answers that speculation changed", None, unequal, 0, unequal == 0)
        yield Check("export.lossless", "number of prompts compared", None, lossless["prompts"], 1, lossless["prompts"] >= 1)
        lost = len(lossy.of(measured["by_temperature"]))
        if lost:
            yield Check("export.lossless", "number of temperatures decoded by a lossy rule", None, lost, 0, False)
    if export.maximum_memory is not None:
        limit = export.maximum_memory
        yield Check("export.maximum_memory", "memory added, in MiB,", None, memory, limit, bool(memory <= limit))


def extra_memory(config: PreTrainedConfig, parameters: int, bytes_each: int, positions: int) -> float:
    """MiB that a draft adds: its weights, and keys and values of one sequence of ``positions``."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    cache = 2 * config.num_hidden_layers * groups * head * positions
    return (parameters + cache) * bytes_each / MIB


def evidence(export: Export, found: list[Check], memory: float, draft: str, measured_by: str) -> dict[str, Any]:
    """The content of gate.json. ``draft`` hashes the measured files, ``measured_by`` names the measuring result."""
    return {
        "gate": "on" if export.gate else "off",
        "passed": all(check.passed for check in found),
        "checks": [asdict(check) for check in found],
        "memory_mib": round(memory, 2),
        "draft_sha256": draft,
        "speculate": measured_by,
    }


def refuse(found: list[Check], where: str) -> None:
    """Refuse a draft that failed.

    Raises:
        PipelineError: naming each figure that failed and by how much.
    """
    failed = [check for check in found if not check.passed]
    if failed:
        lines = "\n".join(f"  {check.shortfall}" for check in failed)
        raise PipelineError(
            f"export.gate=on: the draft is not exported, because\n{lines}\n"
            f"the evidence is in {where}; train a better draft, change these thresholds, or give export.gate=off"
        )


def refuse_altered(measured: str | None, found: str) -> None:
    """Refuse a draft whose files are not the ones that were measured; no switch turns this off.

    Raises:
        PipelineError: the hashes differ, or none was recorded.
    """
    if measured is None:
        raise PipelineError(
            "export: the draft was measured by a version that kept no hash of its files; remove its result of stage "
            "speculate and measure it again"
        )
    if measured != found:
        raise PipelineError(
            f"export: the draft's files were altered after they were measured (SHA-256 {measured[:12]}… then, {found[:12]}… "
            "now); remove its results of stages distil and speculate, and run both again"
        )
