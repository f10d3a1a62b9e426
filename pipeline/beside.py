"""The drafts to read a run's own by: itself undistilled, trained by hard cross-entropy alone, and the best so far.

They are looked up among the finished results of stage distil that learnt from the same cache. What is found changes with
what else is distilled, so it is part of no result and of no fingerprint: every execution looks anew when it publishes its
report, also when all its stages were skipped. A manifest that is damaged, or of something else, is passed over. What the
table looks like is not known here.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data.artifact import MANIFEST, differences, fingerprint
from pipeline import lossy
from pipeline.choices import Coding, Divergence, Stage
from pipeline.config import Objective
from pipeline.context import Context

UNDISTILLED, THIS, TWIN, BEST = "undistilled", "this draft", "cross-entropy alone", "best so far"
SAME = ("stage", "format", "parents")  # of the identities of drafts that learnt from one cache
STAGES = "stages=[corpus,generate,logits,distil]"
NOT_OURS = (KeyError, TypeError, ValueError, AttributeError)  # what reading something else's manifest raises


@dataclass(frozen=True)
class Result:
    """A finished result of a stage, by its manifest."""

    fingerprint: str
    identity: dict[str, Any]
    details: dict[str, Any]


@dataclass(frozen=True)
class Neighbour:
    """A line of the table. ``draft`` is the fingerprint of a result of distil, None where there is none.

    ``validation`` and, if it was decoded with, ``test``: ``overlap`` and ``top1`` by temperature of the text. ``measured``: the
    speed ratio (``median``, ``low``, ``high``, ``lossy``) by temperature; not ``alike``: with other settings than this run's
    or on another machine. ``differs``: the keys that tell it from this run's draft; ``arguments`` of the command that makes
    it, if it is missing.
    """

    name: str
    draft: str | None = None
    validation: dict[str, dict[str, float]] = field(default_factory=dict)
    test: dict[str, dict[str, float]] = field(default_factory=dict)
    ratio_estimated: float | None = None
    best_step: int | None = None
    steps: int | None = None
    read_per_step: int | None = None
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    alike: bool = True
    differs: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Race:
    """What a result of speculate says, by temperature: agreement ``before`` distillation and ``after`` it, and speed."""

    alike: bool = True
    before: dict[str, dict[str, float]] = field(default_factory=dict)
    after: dict[str, dict[str, float]] = field(default_factory=dict)
    ratios: dict[str, dict[str, Any]] = field(default_factory=dict)


def of(context: Context) -> list[Neighbour]:
    """The table of a run that has reached the stage speculate; empty of a draft that was not trained here."""
    distil, speculate, config = context.parent(Stage.distil), context.parent(Stage.speculate), context.config
    drafts, races = (results(artifact.folder.parent) for artifact in (distil, speculate))
    # codec=auto settles on a cache for each objective: no run of another one would be found here.
    arguments = [] if config.codec.kind is Coding.auto else twin_arguments(context.overrides, config.objective)
    return neighbours(distil.fingerprint, speculate.fingerprint, drafts, races, arguments)


def results(folder: Path) -> list[Result]:
    """The finished results below the folder of a stage, as far as they can be read and are what their names say."""
    found = []
    for path in sorted(folder.glob(f"*/{MANIFEST}")):
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            one = Result(path.parent.name, manifest["identity"], manifest["details"])
        except (OSError, *NOT_OURS):
            continue
        if isinstance(one.identity, dict) and isinstance(one.details, dict) and fingerprint(one.identity) == one.fingerprint:
            found.append(one)
    return found


def neighbours(
    own: str, raced: str, drafts: Sequence[Result], races: Sequence[Result], arguments: list[str]
) -> list[Neighbour]:
    """The lines for the draft ``own``, decoded with in the race ``raced``; ``arguments`` make its twin."""
    identities = {one.fingerprint: one.identity for one in drafts}
    mine = identities.get(own, {})
    decoded = _decoded(raced, races)
    known = [
        _line(one, mine, decoded.get(one.fingerprint, _Race()))
        for one in drafts
        if all(one.identity.get(k) == mine.get(k) for k in SAME)
    ]
    lines = {line.draft: line for line in known if line is not None}
    if own not in lines:
        return []
    this = lines[own]
    twins = sorted((name for name in lines if _is_twin(identities[name], mine)), key=lambda name: (name != own, name))
    twin = Neighbour(TWIN, arguments=arguments) if not twins else lines[twins[0]]
    best = max(lines.values(), key=lambda line: (line.ratio_estimated, line.draft == own, line.draft))
    before = Neighbour(UNDISTILLED, test=decoded.get(own, _Race()).before, read_per_step=this.read_per_step)
    return [before, replace(this, name=THIS), replace(twin, name=TWIN), replace(best, name=BEST)]


def _line(result: Result, mine: dict[str, Any], race: _Race) -> Neighbour | None:
    """What a result of distil says of its draft; None if it does not say it all."""
    details = result.details
    try:
        found: dict[str, dict[str, float]] = {}
        for name, value in details["validation"].items():
            if match := re.fullmatch(r"validation-([\d.e+-]+)/(overlap|top1)", name):
                found.setdefault(match[1], {})[match[2]] = float(value)
        ratio, step = float(details["draft/ratio_estimated"]), int(details["best_step"])
        steps, read = int(result.identity["trainer"]["max_steps"]), int(details["shape"]["read_per_step"])
    except NOT_OURS:
        return None
    if not math.isfinite(ratio):
        return None
    differs = differences(result.identity, mine)
    return Neighbour("", result.fingerprint, found, race.after, ratio, step, steps, read, race.ratios, race.alike, differs)


def _is_twin(identity: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Whether a draft differs from this run's in nothing but being trained by cross-entropy alone, or is it and was."""
    objective = identity.get("objective")
    if not isinstance(objective, dict) or objective.get("divergence") != Divergence.cross_entropy.name:
        return False
    others = [{key: value for key, value in one.items() if key != "objective"} for one in (identity, mine)]
    return objective.get("reference") is None and others[0] == others[1]


def _decoded(raced: str, races: Sequence[Result]) -> dict[str, _Race]:
    """By draft, the race ``raced`` of this run, else one with its settings, else any."""
    settings = {one.fingerprint: {key: value for key, value in one.identity.items() if key != "parents"} for one in races}
    found: dict[str, _Race] = {}
    for one in sorted(races, key=lambda one: one.fingerprint != raced):
        try:
            draft, entries = str(one.identity["parents"]["distil"]), one.details["by_temperature"].items()
            race = _Race(
                settings[one.fingerprint] == settings.get(raced),
                {t: _agreement(entry["before"]) for t, entry in entries if entry["before"]},
                {t: _agreement(entry["after"]) for t, entry in entries},
                {t: _ratio(entry) for t, entry in entries},
            )
        except NOT_OURS:
            continue
        if draft not in found or (race.alike and not found[draft].alike):
            found[draft] = race
    return found


def _agreement(measures: dict[str, Any]) -> dict[str, float]:
    return {name: float(measures[name]) for name in ("overlap", "top1")}


def _ratio(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: float(entry["ratio"][key]) for key in ("median", "low", "high")} | {"lossy": lossy.LABEL in entry}


def twin_arguments(overrides: Sequence[str], objective: Objective) -> list[str]:
    """The overrides of the same run with hard cross-entropy alone, as far as the draft."""

    def replaced(override: str) -> bool:
        key = override.partition("=")[0].lstrip("+~").partition("@")[0]
        return key in ("objective", "stages") or key.startswith("objective.")

    # A reference may come from an experiment's file, which a choice of the objective does not touch.
    whole = [] if objective.reference is None else ["objective.reference=null", "objective.keep=1.0"]
    return [*(one for one in overrides if not replaced(one)), "objective=cross_entropy", *whole, STAGES]
