"""What travels with an exported draft: a model card and its provenance. No paths, no environment, no secrets.

Names come from users and may hold anything, so they are quoted where YAML reads them. An override is written down only
if its value is a plain word or number: what looks like a place or a text stays at home.
"""

import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import yaml

from pipeline import lossy, price
from pipeline.choices import Stage
from pipeline.context import Context
from pipeline.expand import Bound
from pipeline.hardware import machine
from pipeline.proposer import words
from pipeline.serve import GGUF
from pipeline.target import TargetFiles

PACKAGES = ("draftsmith", "torch", "transformers", "lightning", "datasets", "mlflow", "gguf")
PRIVATE = ("paths.", "tracking.", "hydra.", "target.system_prompt")  # keys whose values are never written down
PLAIN = re.compile(r"[\w.,+\-\[\] ]*")
MODEL, HEADS = "A small model that", "A set of heads on the target's last hidden state, which"
HEADS_ALONE, WIDE = "no other reads these files", "an engine that lists a logit for every token pays more for a draft step"
MULTIPLIED = "here the two matrices of its head are multiplied out to one, which other engines pay for at every draft step"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Excluded:
    """Shares of probability on excluded ids: the largest ``seen`` where the head was widened, and a ``bound`` on held-out
    states."""

    seen: float
    bound: Bound


def model_card(context: Context, excluded: Excluded | None) -> str:
    """A Hugging Face model card with the measured figures; ``excluded`` is None of heads, which exclude by having no rows."""
    name, export = context.target.name, context.config.export
    license_id = license_of(context.target)
    entries = context.parent(Stage.speculate).details["by_temperature"]
    shape = context.parent(Stage.distil).details["shape"]
    heads = bool(shape.get("heads"))
    elsewhere = HEADS_ALONE if heads else MULTIPLIED if shape.get("head_rank") else WIDE
    facts = ", ".join(f"{key} {value}" for key, value in machine().items())
    front = {
        "library_name": "draftsmith" if heads else "transformers" if export.with_transformers else "gguf",
        "pipeline_tag": "text-generation",
        "base_model": base_model(context),
        "license": license_id or "unknown",
        "tags": ["speculative-decoding", "medusa" if heads else "draft-model"],
    }
    return f"""---
{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---

# {"Medusa heads" if heads else "Draft model"} for {_inline(name)}

{HEADS if heads else MODEL} proposes tokens for {_inline(name)} in speculative decoding. Alone it writes poor text; with its
target the output is the target's own. {words(shape)}, {shape["parameters"] / 1e6:.1f} M parameters as trained.
Distilled and measured by Draftsmith. `serve.md` has the command for
each engine.

{_license_text(license_id)}

## Measured

{facts}; {str(context.dtype).removeprefix("torch.")}; one prompt at a time; K drafted tokens a round.

{_acceptance(entries)}
{_speed(entries)}{_loss(entries)}
{"" if heads else _stock(entries)}## Limits

- Figures hold for prompts like those of the run and for this machine; other domains agree less, other machines pay otherwise.
- The time ratio is that of Draftsmith's own engine; {elsewhere}.
{_vocabulary_text(context, excluded)}"""


def _loss(entries: dict[str, Any]) -> str:
    """What is said of figures that were measured with loss; such a draft serves exact rules all the same."""
    lines = [f"- Temperature {t}: {lossy.words(found)}." for t, found in lossy.of(entries).items()]
    if not lines:
        return ""
    head = "**Lossy:** some of these figures hold for a rule that changes what the target says, and for that rule alone."
    return "\n".join(["", head, "", *lines, ""])


def _acceptance(entries: dict[str, Any]) -> str:
    lines = [
        f"| {t}{lossy.mark(e)} | {e['draft_tokens']} | {e['after']['overlap']:.3f} | {e['after']['top1']:.3f} "
        f"| {e['acceptance_rate']:.2f} | {e['tokens_per_round']:.2f} | {e['positions']:,} |"
        for t, e in entries.items()
    ]
    header = "| temperature | K | overlap | same best token | accepted ÷ proposed | tokens a round | held-out positions |"
    return "\n".join([header, "| --- " * 7 + "|", *lines]) + "\n"


def _speed(entries: dict[str, Any]) -> str:
    lines = [
        f"| {t}{lossy.mark(e)} | {e['draft_tokens']} "
        f"| {e['ratio']['median']:.2f} [{e['ratio']['low']:.2f}, {e['ratio']['high']:.2f}] | {e['predicted']:.2f} "
        f"| {e['plain_tokens_per_second']:.1f} → {e['speculative_tokens_per_second']:.1f} "
        f"| {len(e['prompts'])} |"
        for t, e in entries.items()
    ]
    header = "| temperature | K | speed ratio [95 %] | predicted | tokens/s, plain → speculative | prompts timed |"
    return "\n".join([header, "| --- " * 6 + "|", *lines]) + "\n"


def _stock(entries: dict[str, Any]) -> str:
    """The price of a head with all rows: this draft in transformers' assisted generation beside Draftsmith's engine."""
    timed = {t: e for t, e in entries.items() if "stock" in e}
    if not timed:
        return "Acceptance and the cost of a step were not measured in a stock engine.\n\n"
    lines = [
        f"| {t} | {e['draft_tokens']} | {e['acceptance_rate']:.2f} → {e['stock']['acceptance_rate']:.2f} "
        f"| {e['tokens_per_round']:.2f} → {e['stock']['tokens_per_round']:.2f} "
        f"| {e['stock']['draft_step_here']:.3f} → {e['stock']['draft_step']:.3f} "
        f"| {1e3 * e['stock']['draft_step_seconds_here']:.1f} → {1e3 * e['stock']['draft_step_seconds']:.1f} |"
        for t, e in timed.items()
    ]
    header = "| temperature | K | accepted ÷ proposed | tokens a round | draft step ÷ plain step | draft step, ms |"
    table = "\n".join([header, "| --- " * 6 + "|", *lines])
    note = "From Draftsmith's engine → to transformers' assisted generation, the head with a row for every token:"
    reckoned = {t: e for t, e in timed.items() if "whole_vocabulary" in e["stock"]}
    whole = [f"- Temperature {t}: {price.text(e['stock'], e['draft_tokens'])}." for t, e in reckoned.items()]
    return "\n".join([note, "", table, "", *whole, *([""] if whole else []), ""])


def _vocabulary_text(context: Context, excluded: Excluded | None) -> str:
    coverage, size = (context.parent(Stage.distil).details[name] for name in ("vocabulary_coverage", "shape"))
    if excluded is None and size["vocabulary"] < context.target.vocabulary_size:
        return f"- They propose {coverage:.1%} of the generated text's tokens; they have no rows for the others.\n"
    if excluded is None or (coverage == 1 and excluded.seen == 0):
        return "- Every token of the target's vocabulary can be proposed.\n"
    return (
        f"- It proposes {coverage:.1%} of the generated text's tokens; the head rows of all others push their logits far "
        f"below. At most {excluded.seen:.1e} of the probability lay on them at any position that the rows were set by; on "
        f"held-out states ({excluded.bound.positions:,}) {excluded.bound.mass:.1e} is a bound, for the state that projects "
        "least on the rows' direction. It bounds states like these, no others.\n"
    )


def _inline(name: str) -> str:
    """A name in a line of Markdown, as code; a backtick or a line's end inside would break out of it."""
    return "`" + re.sub(r"[`\s]+", " ", name).strip() + "`"


def _license_text(license_id: str | None) -> str:
    if license_id is None:
        return "The target's files state no license; the draft is made from the target's weights, so ask its publisher."
    return f"License: {license_id}, carried over from the target, of whose weights the draft is made."


def base_model(context: Context) -> str:
    """The target's hub name, or the last part of where it lay."""
    path = context.config.target.path
    return path if HUB_NAME.fullmatch(path) and not Path(path).exists() else context.target.name


def license_of(target: TargetFiles) -> str | None:
    """The license id that the target's model card or GGUF file states, None where neither does."""
    stated = None
    card = target.folder / "README.md"
    if target.gguf is not None:
        field = gguf.GGUFReader(target.gguf).fields.get("general.license")
        stated = field.contents() if field else None
    elif card.is_file():
        text = card.read_text(encoding="utf-8", errors="replace")
        front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
        try:
            found = yaml.safe_load(front.group(1)) if front else None
        except yaml.YAMLError:
            found = None
        stated = found.get("license") if isinstance(found, dict) else None
    return stated if isinstance(stated, str) and re.fullmatch(r"[\w.+-]+", stated) else None


def provenance(context: Context, run_id: str, result: str) -> dict[str, Any]:
    """Fingerprints and runs of every stage, of the export itself ``result`` and ``run_id``; versions, and the overrides."""
    runs = {stage.name: artifact.run_id for stage, artifact in context.artifacts.items()}
    return {
        "target": {"name": context.target.name, "fingerprint": context.target.fingerprint},
        "stages": {**{stage.name: one.fingerprint for stage, one in context.artifacts.items()}, Stage.export.name: result},
        "runs": {**{name: run for name, run in runs.items() if run}, Stage.export.name: run_id},
        "draft_sha256": context.parent(Stage.speculate).draft,
        "overrides": shareable(context.overrides),
        "versions": {package: version(package) for package in PACKAGES},
        "machine": machine(),
        "files": {"gguf": GGUF if context.config.export.with_gguf else None},
        **lossy.recorded(context.parent(Stage.speculate).details),
    }


def command(overrides: list[str]) -> str:
    """The command of a run, fit for strangers."""
    return " ".join(["python -m pipeline", *shareable(overrides)])


def shareable(overrides: list[str]) -> list[str]:
    """Overrides fit for strangers: a value that could be a path, an address or a text becomes "…"."""
    shown = []
    for override in overrides:
        key, _, value = override.partition("=")
        name = key.lstrip("+~")
        private = name.startswith(PRIVATE) or name.endswith("path") or not PLAIN.fullmatch(value)
        shown.append(f"{key}=…" if private else override)
    return shown
