"""The model registry: every registered export is a version, and an alias stands on the one that was shown to be fastest.

The alias moves only to a draft that beat its holder on the same prompts, in the same number format, on the same machine:
the interval of the paired ratio must lie above 1. It knows no store; it is given a run that tracking opened.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from data.artifact import fingerprint
from pipeline import lossy
from pipeline.choices import Stage
from pipeline.context import Context
from pipeline.hardware import machine
from pipeline.statistics import median_interval
from pipeline.tracking import Run

ALIAS = "fastest"
CONDITIONS, SPEEDS = "draftsmith.conditions", "draftsmith.speeds"  # tags of a version


@dataclass(frozen=True)
class Registered:
    """A version, whether the alias stands on it, and why, in words."""

    name: str
    version: int
    leads: bool
    reason: str


def register(context: Context, run: Run, folder: Path, passed: bool) -> Registered:
    """Make ``folder`` a version of the model ``export.register``, and move the alias if this draft earned it.

    ``passed``: what the gate said; a draft that it would have refused never leads, nor one that was measured with loss.
    """
    name, client = str(context.config.export.register), run.client
    measured = context.parent(Stage.speculate).details
    tags = {CONDITIONS: conditions(context), SPEEDS: json.dumps(speeds(measured))}
    loss = lossy.recorded(measured)
    tags |= lossy.tags(context.config.decoding) if loss else {}
    run.folder(folder, "draft")
    with FileLock(context.work / "registry.lock"):  # of two jobs that finish at once, the second meets the first's alias
        if not client.search_registered_models(f"name = '{name}'"):
            client.create_registered_model(name)
        holder = client.get_registered_model(name).aliases.get(ALIAS)
        made = client.create_model_version(name, f"runs:/{run.run_id}/draft", run.run_id, tags)
        if not passed:
            leads, reason = False, "it did not pass the gate"
        elif loss:
            leads, reason = False, "its speed was measured with a lossy rule"
        elif holder is None:
            leads, reason = True, "it is the first that passed the gate"
        else:
            leads, reason = beats(tags, client.get_model_version(name, holder).tags, context.config.seed)
            reason = f"version {holder}: {reason}"
        if leads:
            client.set_registered_model_alias(name, ALIAS, made.version)
    return Registered(name, int(made.version), leads, reason)


def conditions(context: Context) -> str:
    """A hash of what two drafts must share for their times to be compared: texts, decoding settings, machine, format."""
    decoding = context.config.decoding
    return fingerprint(
        {
            "target": context.target.fingerprint,
            "texts": context.parent(Stage.generate).fingerprint,
            "decoding": {key: getattr(decoding, key) for key in ("temperatures", "top_k", "top_p", "min_p", "max_new_tokens")},
            "verification": decoding.verification.name,
            "machine": machine(),
            "precision": str(context.dtype),
        }
    )


def speeds(measured: dict[str, Any]) -> dict[str, float]:
    """Speed ratio by temperature and prompt, plain ÷ speculative seconds; ``measured`` are the details of stage speculate."""
    return {
        f"{temperature} {row['id']}": row["plain_seconds"] / row["speculative_seconds"]
        for temperature, entry in measured["by_temperature"].items()
        for row in entry["prompts"]
    }


def beats(new: dict[str, str], old: dict[str, str], seed: int) -> tuple[bool, str]:
    """Whether the draft with the tags ``new`` was shown to be faster than the one with the tags ``old``, and in words."""
    mine, theirs = (json.loads(tags.get(SPEEDS, "{}")) for tags in (new, old))
    if new[CONDITIONS] != old.get(CONDITIONS) or mine.keys() != theirs.keys():
        return False, "not comparable, it was measured on other prompts, settings or another machine"
    median, low, high = median_interval([mine[key] / theirs[key] for key in mine], seed)
    found = f"{median:.2f}× its speed [{low:.2f}, {high:.2f}] on the same {len(mine)} prompts"
    return low > 1, found if low > 1 else f"{found}, which is not shown to be faster"
