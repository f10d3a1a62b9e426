"""The way from stage to stage: who needs whom, what is skipped, what is refused.

A stage is a module with ``identity`` (everything that shapes its result) and ``run`` (writes the result into a folder).
A result whose fingerprint exists is used again; a result that is needed and missing is refused with the difference.
"""

import errno
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from filelock import FileLock, Timeout

from data.artifact import MANIFEST, differences, fingerprint, folder_hash, write_json
from data.shards import DamagedShardError
from data.states import DamagedStatesError
from pipeline import (
    as_it_is,
    calibrate,
    corpus,
    described,
    distil,
    drafters,
    existing,
    export,
    generate,
    lineage,
    logits,
    lossy,
    rehearsal,
    report,
    speculate,
    sweep,
    tables,
    tracking,
)
from pipeline.check import check
from pipeline.choices import Stage
from pipeline.config import Config
from pipeline.context import Artifact, Context
from pipeline.errors import PipelineError
from pipeline.hardware import machine
from pipeline.noise import quieten
from pipeline.route import PARENTS, ancestors, parents

log = logging.getLogger("draftsmith")

DECODING = (Stage.speculate, Stage.report, Stage.export, Stage.drafters)  # they show what decoding measured

MODULES = {
    Stage.corpus: corpus,
    Stage.generate: generate,
    Stage.logits: logits,
    Stage.distil: distil,
    Stage.calibrate: calibrate,
    Stage.speculate: speculate,
    Stage.report: report,
    Stage.export: export,
    Stage.drafters: drafters,
}


def execute(
    config: Config, work: Path, output: Path, params: dict[str, object], overrides: list[str], token: str | None = None
) -> float:
    """Run the wanted stages, print the table, and return the measured speed ratio (NaN if there is none).

    A job of a sweep, whose ``token`` it is given, is not repeated when a finished job has its results; whatever it
    fails by, it leaves a run.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    quieten()
    if existing.as_it_is(config):
        config, params = existing.settled(config), params | {f"draft.{name}": value for name, value in existing.WHOLE.items()}
    context = Context(config, work, output, overrides)
    tags = {"git_sha": described.git_sha(), "machine": str(machine()["cpu"]), "threads": str(machine()["threads"])}
    if config.logits.dry_run:
        context.artifacts = {stage: _finished(stage, context) for stage in ancestors(list(PARENTS[Stage.logits]), config)}
        with _mendable(context):
            rehearsal.show(context)
        return float("nan")
    if token is None:
        _look_ahead(context)
    elif (ratio := _done_before(context, token)) is not None:
        log.info("%s: finished before, skipped", described.run_name(overrides))
        return ratio
    with tracking.execution(config.tracking, work, described.run_name(overrides), tags, token) as run:
        loss = lossy.tags(config.decoding) if set(config.stages) & set(DECODING) else {}
        run.tags({"overrides": " ".join(overrides), "output": str(output), **loss})
        run.params(params)
        run.text(yaml.safe_dump(described.nested(params), sort_keys=False), "config.yaml")
        if token is not None:
            _look_ahead(context)
        for stage in ancestors(config.stages, config):
            try:
                context.artifacts[stage] = _reach(stage, context, run)
            except PipelineError:
                if stage is Stage.export:  # what was measured is worth seeing, the more so when the gate refuses it
                    _conclude(context, run)
                raise
        ratio = _conclude(context, run)
        run.tags({"draftsmith.results": _results({stage: found.fingerprint for stage, found in context.artifacts.items()})})
        return ratio


def _look_ahead(context: Context) -> None:
    """Refuse what would fail only after hours."""
    check(context.config)
    if context.config.draft.path is not None:
        existing.look_ahead(context.config, context.target)
    if Stage.export in context.config.stages:
        export.look_ahead(context, _foreseen(context, [Stage.export])[Stage.export])
    if Stage.drafters in context.config.stages:
        results = _foreseen(context, [Stage.drafters])
        drafters.look_ahead(context, *(results[stage].name for stage in (Stage.generate, Stage.corpus)))


def _done_before(context: Context, token: str) -> float | None:
    """The speed ratio of the finished job with the results that this one will have, if they are still there."""
    try:
        _look_ahead(context)
        folders = _foreseen(context, context.config.stages)
    except Exception:  # whatever it is, the execution meets it again and records it
        return None
    if not all((folder / MANIFEST).is_file() for folder in folders.values()):
        return None
    results = _results({stage: folder.name for stage, folder in folders.items()})
    return sweep.outcome(context.config.tracking, context.work, token, results)


def _results(fingerprints: dict[Stage, str]) -> str:
    return fingerprint({stage.name: value for stage, value in fingerprints.items()})


def _conclude(context: Context, run: tracking.Run) -> float:
    """Log and print what was found; gives the measured speed ratio."""
    headline = {name: value for artifact in context.artifacts.values() for name, value in artifact.metrics.items()}
    found = lineage.of(context, context.artifacts.values())
    run.reads(found.data, [])
    run.makes(found.models)
    run.metrics(headline)
    beside = report.publish(context, run) if Stage.report in context.artifacts else []
    if Stage.drafters in context.artifacts:
        drafters.publish(context, run)
    tables.show(context, tracking.store_uri(context.config.tracking, context.work), beside)
    return headline.get("speed/ratio", float("nan"))


def _reach(stage: Stage, context: Context, run: tracking.Run) -> Artifact:
    """The stage's result: found, or made now if it is wanted."""
    module = _module(stage, context.config)
    identity, folder = _place(stage, context)
    inspected = stage is Stage.logits and (context.config.logits.verify or context.config.logits.repair)
    if inspected and not (folder / MANIFEST).is_file():
        raise PipelineError(f"logits.verify, logits.repair: {_missing(stage, identity, folder)}")
    if (folder / MANIFEST).is_file():
        if inspected:
            with _alone(stage, folder), _mendable(context):
                logits.inspect(context, folder)
        log.info("%s: nothing has changed, skipped (%s)", stage.name, folder.name)
        return _read(stage, folder)
    if stage not in context.config.stages and not existing.as_it_is(context.config):
        raise PipelineError(_missing(stage, identity, folder))
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(stage, folder):
        if not (folder / MANIFEST).is_file():
            log.info("%s: begins (%s)", stage.name, folder.name)
            tags = {"stage": stage.name, "fingerprint": folder.name, "folder": str(folder)}
            tags |= lossy.tags(context.config.decoding) if stage in DECODING else {}
            before = parents(stage, context.config)
            draft = folder_hash(context.parent(Stage.distil).folder / "draft") if Stage.distil in before else None
            with run.child(stage.name, tags) as child:
                read = lineage.of(context, map(context.parent, before))
                child.reads(read.data, read.models)
                with _mendable(context):
                    metrics, details = module.run(context, folder, child)
                made = lineage.of(context, [Artifact(stage, folder, folder.name, metrics, details)])
                child.makes(made.models)
                child.metrics(metrics, about=read.draft or made.draft)
                child.text(json.dumps(details, indent=2, default=str), "details.json")
            record = {"identity": identity, "metrics": metrics, "details": details, "run_id": child.run_id, "draft": draft}
            write_json(folder / MANIFEST, record)
    return _read(stage, folder)


def _module(stage: Stage, config: Config) -> Any:
    return as_it_is if stage is Stage.distil and existing.as_it_is(config) else MODULES[stage]


def _place(stage: Stage, context: Context) -> tuple[dict[str, Any], Path]:
    """The identity of a stage's result, and its folder."""
    module = _module(stage, context.config)
    identity = {
        "stage": stage.name,
        "format": module.FORMAT,
        **module.identity(context),
        "parents": {parent.name: context.parent(parent).fingerprint for parent in parents(stage, context.config)},
    }
    return identity, context.work / "artifacts" / stage.name / fingerprint(identity)


def _foreseen(context: Context, wanted: list[Stage]) -> dict[Stage, Path]:
    """The folders that the wanted stages and their ancestors will have: identities say all that shapes a result."""
    for stage in ancestors(wanted, context.config):
        folder = _place(stage, context)[1]
        context.artifacts[stage] = Artifact(stage, folder, folder.name, {}, {})
    folders = {stage: artifact.folder for stage, artifact in context.artifacts.items()}
    context.artifacts.clear()
    return folders


@contextmanager
def _alone(stage: Stage, folder: Path) -> Iterator[None]:
    """Hold the lock of a result; of several processes that want it, one computes it and the others wait."""
    lock = FileLock(folder.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("%s: another process computes it, waiting (%s)", stage.name, folder.name)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _finished(stage: Stage, context: Context) -> Artifact:
    """The stage's result if it is there; nothing is written."""
    identity, folder = _place(stage, context)
    if not (folder / MANIFEST).is_file():
        raise PipelineError(_missing(stage, identity, folder))
    context.artifacts[stage] = _read(stage, folder)
    return context.artifacts[stage]


@contextmanager
def _mendable(context: Context) -> Iterator[None]:
    """Let what the user can mend out as a message that says how."""
    try:
        yield
    except DamagedShardError as error:
        raise PipelineError(f"{error}; write it again with stages=[logits] logits.repair=true") from error
    except DamagedStatesError as error:
        unfinished = f"remove {context.parent(Stage.generate).folder / MANIFEST} and run stages=[generate,logits]"
        raise PipelineError(f"{error}; {unfinished}: only what is damaged is written again") from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise PipelineError(
            f"paths.work={context.config.paths.work}: the disk is full; make room and give the same command again, "
            "what is finished is kept"
        ) from error


def _read(stage: Stage, folder: Path) -> Artifact:
    manifest = json.loads((folder / MANIFEST).read_text())
    kept = (manifest[key] for key in ("metrics", "details"))
    return Artifact(stage, folder, folder.name, *kept, manifest.get("run_id"), manifest.get("draft"))


def _missing(stage: Stage, identity: dict[str, Any], folder: Path) -> str:
    """Why a result that is needed is not there, and what to do."""
    others = sorted(folder.parent.glob(f"*/{MANIFEST}"), key=lambda path: path.stat().st_mtime)
    message = f"stages: {stage.name} is needed, has no result for these settings, and is not among the stages to run"
    if others:
        found = json.loads(others[-1].read_text())["identity"]
        lines = "\n".join(f"  {line}" for line in differences(identity, found))
        message += f"\nits latest result differs (found → wanted):\n{lines}"
    return f"{message}\nadd {stage.name} to stages, or set these keys back"
