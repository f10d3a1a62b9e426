"""Stage export: a folder that engines load without remote code, let out by the gate and proven in a process of its own.

In this order: the measured files are the files at hand, the gate has its evidence, the folder is written beside its
place, plain transformers computes from it what was trained, and only then a rename makes it appear.
"""

import copy
import json
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from data.artifact import MANIFEST, folder_hash, write_json
from data.responses import Response, read_shards
from pipeline import (
    card,
    engine_rules,
    gate,
    gguf_model,
    gguf_vocabulary,
    heads_export,
    lossy,
    parity,
    place,
    proposer,
    registry,
    serve,
)
from pipeline.choices import Stage
from pipeline.context import Context
from pipeline.errors import PipelineError
from pipeline.expand import Expansion, expand, held_out_bound
from pipeline.gguf_vocabulary import Vocabulary
from pipeline.low_rank import multiplied_out
from pipeline.tracking import Run
from speculative import Draft, MedusaHeads

FORMAT = 3

log = logging.getLogger("draftsmith")


def identity(context: Context) -> dict[str, Any]:
    export = context.config.export
    settings = {key: value for key, value in asdict(export).items() if key != "overwrite"}
    if export.register is None:
        del settings["register"]  # it shapes no file; a name asks for an export that is registered
    return {"export": settings | {"format": export.format.name, "gguf_type": export.gguf_type.name}}


def look_ahead(context: Context, folder: Path) -> None:
    """Refuse what would fail at the end before anything long begins; ``folder`` is where the result will be.

    Raises:
        PipelineError: the destination exists or cannot be written, or the target cannot become a GGUF file.
    """
    manifest, where = folder / MANIFEST, place.destination(context, folder)
    draft = None
    if manifest.is_file():
        draft = json.loads(manifest.read_text())["draft"]
        if place.holds(where, folder.name, draft):
            return
        log.info("export: what was exported is gone or another export took its place, it is made again")
    place.reserve(context, where, folder.name, draft)
    _vocabulary(context)
    manifest.unlink(missing_ok=True)


def run(context: Context, folder: Path, child: Run) -> tuple[dict[str, float], dict[str, Any]]:
    distilled = context.parent(Stage.distil).folder / "draft"
    gate.refuse_altered(context.parent(Stage.speculate).draft, folder_hash(distilled))
    trained = proposer.load(distilled, torch.float32, context.target.fingerprint)
    responses = [r for r in read_shards(context.parent(Stage.generate).folder) if r.tokens]
    if isinstance(trained, MedusaHeads):
        return _heads(context, folder, child, trained, responses)
    rows = context.target.vocabulary_size
    _refuse_foreign(trained, rows)
    seen, held_out = ([r for r in responses if r.request.split == split] for split in ("validation", "test"))
    expansion = expand(trained, map(_text, seen), rows)
    excluded = card.Excluded(expansion.excluded_mass, held_out_bound(expansion, trained, map(_text, held_out)))
    evidence = _pass_gate(context, folder, _memory(context, expansion))
    likeness: dict[str, parity.Likeness] = {}

    def write(new: Path) -> None:
        _write(context, expansion, excluded, evidence, new)
        write_json(new / place.PROVENANCE, card.provenance(context, child.run_id, folder.name))

    def prove(made: Path) -> None:
        likeness.update(_prove(context, trained, made, held_out))

    where = place.publish(context, folder, write, prove)
    metrics, details = _result(context, child, where, evidence, {form: asdict(found) for form, found in likeness.items()})
    by_temperature = context.parent(Stage.speculate).details["by_temperature"]
    details["excluded"] = asdict(excluded)
    details["stock"] = {temperature: entry["stock"] for temperature, entry in by_temperature.items() if "stock" in entry}
    return metrics | {"export/excluded_mass_bound": excluded.bound.mass}, details


def _text(response: Response) -> list[int]:
    return [*response.request.prompt, *response.tokens]


def _heads(
    context: Context, folder: Path, child: Run, heads: MedusaHeads, responses: list[Response]
) -> tuple[dict[str, float], dict[str, Any]]:
    """The same for Medusa heads, which add their weights alone."""
    memory = sum(p.numel() for p in heads.parameters()) * context.dtype.itemsize / gate.MIB
    evidence = _pass_gate(context, folder, memory)
    entries = context.parent(Stage.speculate).details["by_temperature"].values()
    prompts = [r.request.prompt for r in responses if r.request.split == "test"]
    likeness: dict[str, Any] = {}

    def write(new: Path) -> None:
        heads_export.write(context, heads, evidence, next(iter(entries))["draft_tokens"], new)
        write_json(new / place.PROVENANCE, card.provenance(context, child.run_id, folder.name))

    def prove(made: Path) -> None:
        likeness["heads"] = heads_export.prove(context, heads, made, prompts)

    return _result(context, child, place.publish(context, folder, write, prove), evidence, likeness)


def _result(
    context: Context, child: Run, where: Path, evidence: dict[str, Any], likeness: dict[str, dict[str, Any]]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics and details: where the export is, what the gate said, how each form compares with what was trained, and what
    the registry made of it."""
    metrics = {f"export/{form}/{name}": float(value) for form, found in likeness.items() for name, value in found.items()}
    details = {"folder": os.path.relpath(where), "gate": evidence["gate"], "passed": evidence["passed"], **likeness}
    if context.config.export.register is not None:
        made = registry.register(context, child, where, evidence["passed"])
        moved = "moved to it" if made.leads else "stays where it was"
        log.info("export: version %d of %s; %s %s: %s", made.version, made.name, registry.ALIAS, moved, made.reason)
        metrics |= {"registry/version": made.version, "registry/leads": made.leads}
        details["registered"] = asdict(made)
    return metrics, details


def _refuse_foreign(draft: Draft, rows: int) -> None:
    """Refuse a draft whose ids are not the target's."""
    known = draft.model.config.vocab_size if draft.vocabulary is None else int(draft.vocabulary.max()) + 1
    if known > rows or (draft.vocabulary is None and known != rows):
        raise PipelineError(
            f"export: the draft proposes ids up to {known - 1} and the target has ids up to {rows - 1}; it is of another "
            "tokenizer, so distil it again for this target"
        )


def _memory(context: Context, expansion: Expansion) -> float:
    """MiB that a draft model adds."""
    model, generate = expansion.model, context.config.generate
    positions = generate.max_prompt_tokens + generate.max_new_tokens
    return gate.extra_memory(model.config, sum(p.numel() for p in model.parameters()), context.dtype.itemsize, positions)


def _pass_gate(context: Context, folder: Path, memory: float) -> dict[str, Any]:
    """Write gate.json into the stage's folder, and refuse a draft that failed unless the gate is off."""
    export, speculated = context.config.export, context.parent(Stage.speculate)
    found = gate.checks(export, speculated.details, memory)
    evidence = gate.evidence(export, found, memory, str(speculated.draft), speculated.fingerprint)
    evidence |= lossy.recorded(speculated.details)
    write_json(folder / "gate.json", evidence)
    if export.gate:
        gate.refuse(found, os.path.relpath(folder / "gate.json"))
    elif not evidence["passed"]:
        log.warning("export: the gate is off; the draft failed it and is exported all the same")
    return evidence


def _vocabulary(context: Context) -> Vocabulary | None:
    """The vocabulary of the GGUF file, None where none is written."""
    if not context.config.export.with_gguf:
        return None
    gguf_model.check_family(AutoConfig.from_pretrained(context.target.folder, trust_remote_code=False))
    own = context.target.gguf
    found = gguf_vocabulary.build(context.target.tokenizer()) if own is None else gguf_vocabulary.read(own)
    return gguf_vocabulary.padded(found, context.target.vocabulary_size)


def _write(context: Context, expansion: Expansion, excluded: card.Excluded, evidence: dict[str, Any], folder: Path) -> None:
    export, model = context.config.export, expansion.model
    if export.with_transformers:
        model.generation_config = _endings(context)
        model.save_pretrained(folder)
        context.target.tokenizer().save_pretrained(folder)
    vocabulary = _vocabulary(context)
    if vocabulary is not None:
        name = f"Draft for {context.target.name}"
        gguf_model.write(model, vocabulary, export.gguf_type, name, folder / serve.GGUF)
        difference = gguf_vocabulary.incompatibility(vocabulary, gguf_vocabulary.read(folder / serve.GGUF))
        if difference:
            raise PipelineError(f"export.format=gguf: llama.cpp would not let this draft serve its target ({difference})")
    (folder / "README.md").write_text(card.model_card(context, excluded), encoding="utf-8")
    by_temperature = context.parent(Stage.speculate).details["by_temperature"]
    length = next(iter(by_temperature.values()))["draft_tokens"]
    verdicts = engine_rules.verdicts(length, context.target.folder, folder, model.config)
    facts = serve.Facts(verdicts, str(context.dtype).removeprefix("torch."), context.target.gguf is not None)
    text = serve.instructions(export, by_temperature, facts)
    (folder / "serve.md").write_text(text, encoding="utf-8")
    write_json(folder / "gate.json", evidence)


def _endings(context: Context) -> GenerationConfig:
    """The ids that begin, end and pad the target's text, and nothing of how it samples."""
    tokenizer, folder = context.target.tokenizer(), context.target.folder
    if (folder / "generation_config.json").is_file():
        known = GenerationConfig.from_pretrained(folder)
    else:
        known = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    listed = known.eos_token_id if isinstance(known.eos_token_id, list) else [known.eos_token_id]
    ends = sorted({i for i in [*listed, tokenizer.eos_token_id] if i is not None})
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id if known.bos_token_id is None else known.bos_token_id,
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,  # id 0 is one as well
        pad_token_id=tokenizer.pad_token_id if known.pad_token_id is None else known.pad_token_id,
    )


def _prove(context: Context, trained: Draft, folder: Path, held_out: list[Response]) -> dict[str, parity.Likeness]:
    """How every form of the export, read in a fresh process, compares with the trained draft; refused if it differs."""
    export = context.config.export
    forms = {"transformers": {}} if export.with_transformers else {}
    forms |= {"gguf": {"gguf_file": serve.GGUF}} if export.with_gguf else {}
    entries = context.parent(Stage.speculate).details["by_temperature"].values()
    order = parity.job(context.target.folder, folder, forms, held_out, next(iter(entries))["draft_tokens"])
    answers = parity.in_a_fresh_process(order)
    likeness = {}
    for form in forms:
        rounded = trained
        if form == "gguf":
            rounded = Draft(copy.deepcopy(multiplied_out(trained.model)), trained.vocabulary)
            gguf_model.round_weights(rounded.model, export.gguf_type)
        likeness[form] = parity.compare(answers, form, trained, rounded, order)
        parity.require(likeness[form], form, answers["forms"][form]["misplaced"])
    return likeness
