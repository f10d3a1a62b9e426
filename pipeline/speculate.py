"""Stage speculate: what the draft is worth on prompts that nothing has seen.

In this order: agreement, of the undistilled draft too if `decoding.baselines` wants it; the prediction, logged before
anything is decoded; the proof that greedy speculative output equals greedy plain output in float32; then plain, speculative
and transformers decoding, interleaved prompt by prompt, a tree (decoding.tree) among them; each prompt is continued by as
many tokens as the target's own answer has.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from data.responses import Response, read_shards
from pipeline import draft as drafts
from pipeline import heads, held_out, lossless, lossy, plan, price, proposer, race, ready, trainer, trees
from pipeline.calibrate import costs_of, sampling_of, suffix, tree_costs_of
from pipeline.choices import Drafting, Stage
from pipeline.context import Context
from pipeline.errors import PipelineError
from pipeline.expand import expand
from pipeline.hardware import machine
from pipeline.proposer import Proposer
from pipeline.tracking import Run
from pipeline.undistilled import initial
from speculative import MedusaHeads, Sampling, Tree, Typical, pack
from speculative.cost import best_length

FORMAT = 6
LOSSLESS_COUNTS = ("prompts", "different", "oracle_answers", "oracle_different")


def identity(context: Context) -> dict[str, Any]:
    decoding = context.config.decoding
    settings = lossy.without_unused(asdict(decoding), decoding) | {"verification": decoding.verification.name}
    if not trees.used(decoding):
        del settings["tree"]
    if not decoding.compile:
        del settings["compile"]
    return {"decoding": settings, "machine": machine(), "seed": context.config.seed}


def run(context: Context, folder: Path, child: Run) -> tuple[dict[str, float], dict[str, Any]]:
    config = context.config.decoding
    responses = list(read_shards(context.parent(Stage.generate).folder))
    target = ready.target(context)
    trained = context.parent(Stage.distil).folder / "draft"
    draft = ready.draft(proposer.load(trained, context.dtype, context.target.fingerprint), context)
    details: dict[str, Any] = {"by_temperature": {}}
    metrics: dict[str, float] = {}
    plans, chosen = [], {}
    for planned, entry, named in _plans(context, target, draft, responses):
        plans.append(planned)
        temperature = planned.sampling.temperature
        if trees.used(config):
            chosen[temperature], planned_tree, named_tree = _tree(context, target, draft, responses, planned.sampling)
            entry["tree"], named = planned_tree, named | named_tree
        details["by_temperature"][f"{temperature:g}"] = entry
        metrics |= named
    child.metrics(metrics)  # the prediction is on record before the first token is decoded

    helpers = _helpers(context, trained, responses)
    details["lossless"] = lossless.prove(
        *_in_float32(context, target, draft),
        helpers,
        list({r.request.prompt_id: r.request.prompt for r in responses if r.request.split == "test"}.values()),
        config.lossless_tokens,
        max(planned.draft_tokens for planned in plans),
        list(dict.fromkeys(chosen.values())),
        context.target.ids,
    )
    metrics |= {f"lossless/{name}": details["lossless"][name] for name in LOSSLESS_COUNTS}

    low = [helper and pack(helper.to(context.dtype)) for helper in helpers]
    module = race.Race(target, draft, low, lossy.rule(config), context.config.seed, chosen, context.target.ids)
    heats = [heat for planned in plans for heat in planned.heats]
    runner = trainer.make(context.config.trainer, folder)
    with trainer.interruptible(runner):
        runner.test(module, DataLoader(heats, batch_size=None, collate_fn=lambda heat: heat), verbose=False)
    for planned in plans:
        temperature = planned.sampling.temperature
        measured = race.summary([row for row in module.rows if row["temperature"] == temperature], context.config.seed)
        entry = details["by_temperature"][f"{temperature:g}"]
        for part in ("tree", lossy.LABEL):
            if part in measured:
                measured[part] = entry[part] | measured[part]
        if "stock" in measured:
            measured["stock"] = _price(context, measured["stock"], entry, temperature)
        entry |= measured
        end = suffix(temperature, config)
        metrics |= {f"{name}{end}{lossy.ending(config, temperature)}": v for name, v in race.metrics(measured).items()}
        metrics |= lossy.metrics(entry[lossy.LABEL], end) if lossy.LABEL in entry else {}
    return metrics, details


def _plans(
    context: Context, target: PreTrainedModel, draft: Proposer, responses: list[Response]
) -> Iterator[tuple[plan.Plan, dict[str, Any], dict[str, float]]]:
    """By temperature: what to race, what is known before it, and the same as metrics."""
    config = context.config.decoding
    before = [proposer.prepared(initial(context)[0], context.dtype)] if config.baselines else []
    for temperature in config.temperatures:
        sampling = sampling_of(config, temperature)
        texts = held_out.of_split(responses, "test", temperature)
        if not texts:
            raise PipelineError(f"corpus.test={context.config.corpus.test}: no test prompt has an answer at {temperature:g}")
        typical, ids = lossy.typical_at(config, temperature), context.target.ids
        found = _agreements(target, [*before, draft], texts, sampling, f"agreement at {temperature:g}", ids, typical)
        *undistilled, after = found
        costs = costs_of(context.parent(Stage.calibrate).details, temperature)
        recommended = config.draft_tokens
        if recommended is None:  # the test prompts have no say in it
            validation = held_out.of_split(responses, "validation", temperature)
            [seen] = _agreements(target, [draft], validation, sampling, f"K at {temperature:g}", ids, typical)
            recommended = best_length(seen.acceptance, costs, seen.deeper)[0]
        length = max(recommended, 1)  # K = 0 would leave nothing to measure
        planned = plan.make(texts, after, costs, length, sampling, config, context.config.seed)
        end = suffix(temperature, config)
        entry = {
            "before": _measures(undistilled[0]) if undistilled else None,
            "after": _measures(after),
            "positions": after.positions,
            "by_head": after.by_head,
            "kinds": held_out.by_kind(after, texts),
            "draft_tokens": length,
            "recommended_draft_tokens": recommended,
            "predicted": planned.predicted,
            "tokens_per_round_predicted": planned.tokens_per_round,
        }
        if typical is not None:
            loss = {name: after.loss[name] for name in held_out.DISTANCES}
            entry[lossy.LABEL] = lossy.thresholds(config) | loss | {"positions": after.positions}
        label = lossy.ending(config, temperature)
        metrics = {f"speed/ratio_predicted{end}{label}": planned.predicted, f"draft_tokens{end}": length}
        yield planned, entry, metrics | _alignment_metrics(undistilled, after, end)


def _tree(
    context: Context, target: PreTrainedModel, draft: Proposer, responses: list[Response], sampling: Sampling
) -> tuple[Tree, dict[str, Any], dict[str, float]]:
    """The tree to race at one temperature, what is expected of it, and the same as metrics."""
    config, temperature = context.config.decoding, sampling.temperature
    texts = held_out.of_split(responses, "validation", temperature)
    costs = tree_costs_of(context.parent(Stage.calibrate).details, temperature)
    choice = trees.choose(target, draft, texts, sampling, config, costs, context.config.seed, context.target.ids)
    entry = {
        "parents": choice.tree.parents,
        "shape": choice.words,
        "rates": choice.rates,
        "recommended": choice.recommended,
        "predicted": choice.predicted,
        "tokens_per_round_predicted": choice.tokens_per_round,
    }
    named = {"nodes": choice.tree.size, "depth": choice.tree.depth, "ratio_predicted": choice.predicted}
    end = suffix(temperature, config) + lossy.ending(config, temperature)
    return choice.tree, entry, {f"tree/{name}{end}": value for name, value in named.items()}


def _price(context: Context, stock: dict[str, float], entry: dict[str, Any], temperature: float) -> dict[str, Any]:
    """What the expanded draft does in transformers, the trimmed one's cost here, and what a whole vocabulary would do."""
    distilled, rows = context.parent(Stage.distil).details, context.target.vocabulary_size
    found = price.beside(stock, costs_of(context.parent(Stage.calibrate).details, temperature))
    shape, coverage = drafts.Shape(**distilled["shape"]), distilled["vocabulary_coverage"]
    if coverage == 1:
        return found
    length, overlap = entry["draft_tokens"], entry["after"]["acceptance"]
    return found | {"whole_vocabulary": price.whole_vocabulary(shape, rows, coverage, overlap, length, context.dtype.itemsize)}


def _agreements(
    target: PreTrainedModel,
    proposers: Sequence[Proposer],
    texts: list[Response],
    sampling: Sampling,
    title: str,
    ids: int,
    typical: Typical | None,
) -> list[held_out.HeldOut]:
    """Held-out agreement of drafts of one kind."""
    of_kind = heads.measure if isinstance(proposers[0], MedusaHeads) else held_out.measure
    return of_kind(target, proposers, texts, sampling, title, ids, typical)


def _in_float32(context: Context, target: PreTrainedModel, draft: Proposer) -> tuple[PreTrainedModel, Proposer]:
    """The pair in float32: itself, where that is how it decodes."""
    if context.dtype is torch.float32:
        return target, draft
    folder = context.parent(Stage.distil).folder / "draft"
    return context.target.load(torch.float32), proposer.load(folder, torch.float32, context.target.fingerprint)


def _helpers(context: Context, trained: Path, responses: list[Response]) -> list[PreTrainedModel | None]:
    """What transformers decodes with as a baseline: nothing, and a draft model as its assisted generation takes it.

    That is float32, a logit for each row of the target's head. It has no decoding with Medusa heads, and with another
    tokenizer another algorithm.
    """
    if not context.config.decoding.baselines:
        return []
    if context.config.draft.kind is Drafting.medusa:
        return [None]
    draft = drafts.load(trained, torch.float32)
    if draft.inputs is not None:
        return [None]
    texts = ([*r.request.prompt, *r.tokens] for r in responses if r.request.split == "validation" and r.tokens)
    return [None, expand(draft, texts, context.target.vocabulary_size).model]


def _measures(held: held_out.HeldOut) -> dict[str, float]:
    return {**held.means, "acceptance": held.overlap}


def _alignment_metrics(undistilled: list[held_out.HeldOut], after: held_out.HeldOut, end: str) -> dict[str, float]:
    metrics = {f"alignment/{name}{end}": value for name, value in after.means.items()}
    for k, means in enumerate(after.by_head, start=1):
        metrics |= {f"alignment/{name}_head_{k}{end}": means[name] for name in ("overlap", "top1")}
    for before in undistilled:
        metrics |= {f"alignment/{name}_before{end}": before.means[name] for name in ("forward_kl", "overlap", "top1")}
    return metrics
