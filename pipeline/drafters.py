"""Stage drafters: all ways of drafting, raced on the same prompts, one after the other, in an order that turns.

The draft model is this run's, the heads are those that an earlier run trained for the same target. It measures; what
wins where is said in ``pipeline.comparison``.
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment
from rich.progress import track
from transformers import PreTrainedModel

from data.artifact import MANIFEST, file_hash, folder_hash
from data.responses import read_shards
from pipeline import comparison, drafter_prompts, effort, held_out, lossy, proposer
from pipeline.calibrate import sampling_of, suffix
from pipeline.config import Stage
from pipeline.contestants import Trained, Way, ways
from pipeline.context import Context
from pipeline.drafter_prompts import Case
from pipeline.errors import PipelineError
from pipeline.hardware import machine
from pipeline.tracking import Run
from speculative import MedusaHeads, Typical, pack

FORMAT = 1
TEXT, PAGE, RECORD = "drafters.md", "drafters.html", "drafters.json"
TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
  body { font: 15px/1.5 system-ui, sans-serif; color: #1a202c; max-width: 1300px; margin: 2rem auto; padding: 0 1.2rem; }
  .scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
  th, td { padding: .3rem .55rem; text-align: left; border-bottom: 1px solid #e2e8f0; white-space: nowrap; }
  .note { color: #718096; }
</style></head><body>
<h1>{{ title }}</h1>
<p class="note">{{ where }}. Made by <code>{{ command }}</code></p>
{% for temperature, entry in details.by_temperature.items() %}
<h2>Temperature {{ temperature }}{{ mark(entry) }}</h2>
{% if entry.lossy is defined %}<p><b>Lossy:</b> {{ loss(entry) }}.</p>{% endif %}
<div class="scroll"><table>
{% for line in table(entry) %}{% set tag = "th" if loop.first else "td" %}
<tr>{% for cell in line %}<{{ tag }}>{{ cell }}</{{ tag }}>{% endfor %}</tr>
{% endfor %}
</table></div>
<ul>{% for kind, figures in entry.kinds.items() %}<li>{{ kind }}{{ mark(entry) }}: {{ verdict(figures) }}.</li>{% endfor %}</ul>
<p>{{ lossless(entry) }}</p>
{% endfor %}
<p class="note">{{ legend }}</p>
</body></html>
"""


def identity(context: Context) -> dict[str, Any]:
    config, decoding = context.config.drafters, context.config.decoding
    names = ("temperatures", "top_k", "top_p", "min_p", "longest_draft", "tree", "max_new_tokens")
    return {
        "drafters": {name: value for name, value in asdict(config).items() if name not in ("heads", "path")},
        "heads": _heads_hash(config.heads),
        "prompts": _file_hash(config.path),
        "decoding": {name: getattr(decoding, name) for name in names} | {"verification": decoding.verification.name},
        **lossy.thresholds_used(decoding),
        "machine": machine(),
        "precision": str(context.dtype),
        "seed": context.config.seed,
    }


def _heads_hash(folder: str | None) -> str | None:
    if folder is None:
        return None
    place = Path(folder).expanduser()
    if not (place / MANIFEST).is_file() or not (place / "draft").is_dir():
        raise PipelineError(f"drafters.heads={folder}: give a result folder of the stage distil, with its manifest and draft")
    return folder_hash(place / "draft")


def _file_hash(path: str | None) -> str | None:
    if path is None:
        return None
    if not Path(path).expanduser().is_file():
        raise PipelineError(f"drafters.path={path}: there is no such file; give a JSONL file, or null")
    return file_hash(Path(path).expanduser())


def run(context: Context, folder: Path, child: Run) -> tuple[dict[str, float], dict[str, Any]]:
    config, seed = context.config.decoding, context.config.seed
    responses = list(read_shards(context.parent(Stage.generate).folder))
    model, heads = _trained(context, child)
    target = pack(context.target.load(context.dtype))
    details: dict[str, Any] = {"by_temperature": {}}
    metrics: dict[str, float] = {}
    for temperature in config.temperatures:
        sampling = sampling_of(config, temperature)
        texts, answers = (held_out.of_split(responses, split, temperature) for split in ("validation", "test"))
        if not texts or not answers:
            raise PipelineError(f"corpus.validation, corpus.test: no prompt of both has an answer at {temperature:g}")
        cases = drafter_prompts.gather(context, answers)
        timed = drafter_prompts.answered(target, context.target.tokenizer(), cases, config.max_new_tokens, sampling, seed)
        found = ways(target, model, heads, texts, sampling, config, seed)
        typical = lossy.typical_at(config, temperature)
        shown = _shown([timed[0], *timed], temperature)
        rows = [_race(target, found, case, place, typical) for place, case in enumerate(shown)][1:]
        different = [row["different"] for row in rows]
        entry = {
            "ways": [way.facts for way in found],
            "kinds": comparison.summarise(rows, [way.name for way in found], seed),
            "compared": len(rows) * (len(found) - 1),
            "different": sum(different) if sampling.greedy else None,
            "left_out": len(cases) - len(timed),
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
    distilled, place = context.parent(Stage.distil), context.config.drafters.heads
    model = proposer.load(distilled.folder / "draft", context.dtype, context.target.fingerprint)
    seconds = effort.seconds(run, distilled.fingerprint)
    found = Trained("draft model", proposer.prepared(model, context.dtype), seconds)
    if place is None:
        return found, None
    folder = Path(place).expanduser().resolve()
    heads = proposer.load(folder / "draft", context.dtype, context.target.fingerprint)
    if not isinstance(heads, MedusaHeads):
        raise PipelineError(f"drafters.heads={place}: a draft model lies there; name the folder of a run with draft=medusa")
    tree = context.config.decoding.tree
    if isinstance(tree, list) and len(tree) > heads.count:
        raise PipelineError(f"decoding.tree={tree}: the {heads.count} heads of drafters.heads draft no tree deeper than that")
    return found, Trained("Medusa heads", proposer.prepared(heads, context.dtype), effort.seconds(run, folder.name))


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
    command = " ".join(["python -m pipeline", *context.overrides])
    (folder / TEXT).write_text(f"# {title}\n\n{where}\n\n{comparison.markdown(details)}", encoding="utf-8")
    (folder / RECORD).write_text(json.dumps({"target": context.target.name, "machine": machine(), **details}))
    page = Environment(autoescape=True).from_string(TEMPLATE)
    tools = {"table": comparison.table, "verdict": comparison.verdict, "lossless": comparison.lossless}
    tools |= {"mark": lossy.mark, "loss": lambda entry: lossy.words(entry[lossy.LABEL])}
    written = page.render(title=title, where=where, command=command, details=details, legend=comparison.LEGEND, **tools)
    (folder / PAGE).write_text(written, encoding="utf-8")


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
