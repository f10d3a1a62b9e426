"""Stage drafters: all ways of drafting, raced on the same prompts, one after the other, in an order that turns.

The draft model is this run's, the heads are those that an earlier run trained for the same target. It measures; what
wins where is said in ``pipeline.comparison``.
"""

import json
import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import track
from transformers import PreTrainedModel

from data.artifact import file_hash
from data.responses import read_shards
from pipeline import card, comparison, drafter_prompts, drafters_page, effort, held_out, lossy, proposer, ready
from pipeline.calibrate import sampling_of, suffix
from pipeline.choices import Stage
from pipeline.contestants import Trained, Way, ways
from pipeline.context import Context
from pipeline.drafter_prompts import Case
from pipeline.errors import PipelineError
from pipeline.given_heads import GivenHeads
from pipeline.hardware import machine
from pipeline.tracking import Run
from speculative import Typical

log = logging.getLogger("draftsmith")
FORMAT = 2
TEXT, PAGE, RECORD = "drafters.md", "drafters.html", "drafters.json"


def identity(context: Context) -> dict[str, Any]:
    config, decoding = context.config.drafters, context.config.decoding
    names = ("temperatures", "top_k", "top_p", "min_p", "longest_draft", "tree", "max_new_tokens")
    return {
        "drafters": {name: value for name, value in asdict(config).items() if name not in ("heads", "path")},
        "heads": config.heads and GivenHeads(config.heads).fingerprint,
        "prompts": _file_hash(config.path),
        "decoding": {name: getattr(decoding, name) for name in names} | {"verification": decoding.verification.name},
        **lossy.thresholds_used(decoding),
        "machine": machine(),
        "precision": str(context.dtype),
        "seed": context.config.seed,
    }


def _file_hash(path: str | None) -> str | None:
    if path is None:
        return None
    if not Path(path).expanduser().is_file():
        raise PipelineError(f"drafters.path={path}: there is no such file; give a JSONL file, or null")
    return file_hash(Path(path).expanduser())


def look_ahead(context: Context, generate: str, corpus: str) -> None:
    """Refuse what would fail at the end before anything long begins; the two are the fingerprints of the stages' results.

    Raises:
        PipelineError: the heads or the file of prompts cannot be compared with.
    """
    config, decoding, target = context.config.drafters, context.config.decoding, context.target
    most = drafter_prompts.room(target.positions, decoding.max_new_tokens)
    if config.heads is not None:
        heads = GivenHeads(config.heads)
        heads.check(target.fingerprint, decoding.tree)
        if warning := heads.foreign(generate, corpus):
            log.warning("drafters.heads=%s: %s", config.heads, warning)
    if config.path is not None:
        longest = min(most, config.max_prompt_tokens)
        drafter_prompts.of_file(config, target.tokenizer(), context.config.target.system_prompt, longest)


def run(context: Context, folder: Path, child: Run) -> tuple[dict[str, float], dict[str, Any]]:
    config, seed, ids = context.config.decoding, context.config.seed, context.target.ids
    responses = list(read_shards(context.parent(Stage.generate).folder))
    model, heads = _trained(context, child)
    target = ready.target(context)
    known = [context.target.positions, getattr(model.proposer.model.config, "max_position_embeddings", None)]
    most = drafter_prompts.room(min(filter(None, known), default=None), config.max_new_tokens)
    details: dict[str, Any] = {"by_temperature": {}}
    metrics: dict[str, float] = {}
    for temperature in config.temperatures:
        sampling = sampling_of(config, temperature)
        texts, answers = (held_out.of_split(responses, split, temperature) for split in ("validation", "test"))
        if not texts or not answers:
            raise PipelineError(f"corpus.validation, corpus.test: no prompt of both has an answer at {temperature:g}")
        cases = drafter_prompts.gather(context, answers, most)
        timed = drafter_prompts.answered(target, context.target.tokenizer(), cases, config.max_new_tokens, sampling, seed, ids)
        found = ways(target, model, heads, texts, sampling, config, seed, ids)
        typical = lossy.typical_at(config, temperature)
        shown = _shown([timed[0], *timed], temperature)
        rows = [_race(target, found, case, place, typical) for place, case in enumerate(shown)][1:]
        positions = max(len(case.prompt) + case.new_tokens for case in timed)
        different = [row["different"] for row in rows]
        entry = {
            "ways": [way.facts(positions) for way in found],
            "kinds": comparison.summarise(rows, [way.name for way in found], seed),
            "compared": len(rows) * (len(found) - 1),
            "different": sum(different) if sampling.greedy else None,
            "left_out": len(cases) - len(timed),
            "foreign": _foreign(context),
            "prompts": [{name: row[name] for name in ("kind", "new_tokens", "seconds")} for row in rows],
        }
        if typical is not None:
            at_least = {way.name: lossy.at_least(rows, way.name, seed) for way in found}
            entry[lossy.LABEL] = lossy.thresholds(config) | {"at_least": at_least}
        details["by_temperature"][f"{temperature:g}"] = entry
        metrics |= comparison.metrics(entry, suffix(temperature, config) + lossy.ending(config, temperature))
    _write(context, folder, details)
    return metrics, details


def _shown(cases: list[Case], temperature: float) -> Any:
    return track(cases, description=f"{f'drafters at {temperature:g}':<28}", transient=True)


def _trained(context: Context, run: Run) -> tuple[Trained, Trained | None]:
    """The draft model of this run, and the heads if they are named."""
    distilled, named = context.parent(Stage.distil), context.config.drafters.heads
    model = proposer.load(distilled.folder / "draft", context.dtype, context.target.fingerprint)
    seconds = effort.seconds(run, distilled.fingerprint)
    trained = Trained("draft model", ready.draft(model, context), seconds)
    if named is None:
        return trained, None
    given = GivenHeads(named)
    given.check(context.target.fingerprint, context.config.decoding.tree)
    heads = proposer.load(given.draft, context.dtype, context.target.fingerprint)
    seconds = effort.seconds(run, given.folder.name)
    return trained, Trained("Medusa heads", ready.draft(heads, context), seconds)


def _foreign(context: Context) -> str:
    """What is to be said of what the heads have learnt from."""
    named = context.config.drafters.heads
    results = (context.parent(stage).fingerprint for stage in (Stage.generate, Stage.corpus))
    return GivenHeads(named).foreign(*results) if named else ""


def _race(target: PreTrainedModel, found: list[Way], case: Case, place: int, typical: Typical | None) -> dict[str, Any]:
    """One prompt in every way; who begins changes from prompt to prompt. ``typical``: the rule, if it is lossy."""
    turn = place % len(found)
    done = {
        way.name: way.decode(target, case.prompt, case.new_tokens, row_keys=[case.key])
        for way in (*found[turn:], *found[:turn])
    }
    plain = done[comparison.PLAIN].tokens
    texts = {name: one.tokens[0] for name, one in done.items()}
    sampling = found[0].options["sampling"]
    loss = {} if typical is None else {"excess": lossy.measured(target, case.prompt, texts, sampling, typical)}
    return {
        "kind": case.kind,
        "new_tokens": case.new_tokens,
        "seconds": {name: sum(asdict(one.seconds).values()) for name, one in done.items()},
        "acceptance": {name: one.acceptance[0] for name, one in done.items()},
        "different": sum(one.tokens != plain for one in done.values()),
        **loss,
    }


def _write(context: Context, folder: Path, details: dict[str, Any]) -> None:
    facts = ", ".join(f"{key} {value}" for key, value in machine().items())
    where = f"{context.target.name}, {str(context.dtype).removeprefix('torch.')}; {facts}"
    title = f"Drafters for {context.target.name}"
    command = card.command(context.overrides)
    (folder / TEXT).write_text(f"# {title}\n\n{where}. Made by `{command}`\n\n{comparison.markdown(details)}", encoding="utf-8")
    (folder / RECORD).write_text(json.dumps({"target": context.target.name, "machine": machine(), **details}))
    (folder / PAGE).write_text(drafters_page.render(title, where, command, details), encoding="utf-8")


def publish(context: Context, run: Run) -> None:
    """Put the comparison beside this execution's log and on its MLflow run."""
    artifact = context.parent(Stage.drafters)
    for name in (TEXT, PAGE, RECORD):
        shutil.copyfile(artifact.folder / name, context.output / name)
        run.file(artifact.folder / name)
    rows = [
        {
            "temperature": temperature,
            "kind": kind,
            "drafter": name,
            "tokens_per_round": way["tokens_per_round"],
            **way["ratio"],
            "lossy": lossy.LABEL in entry and name != comparison.PLAIN,
        }
        for temperature, entry in artifact.details["by_temperature"].items()
        for kind, figures in entry["kinds"].items()
        for name, way in figures["ways"].items()
    ]
    run.table({key: [row[key] for row in rows] for key in rows[0]}, "drafters_table.json")
