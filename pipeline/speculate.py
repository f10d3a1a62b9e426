"""Stage speculate: what the draft is worth on prompts that nothing has seen.

In this order: agreement before and after distillation; the prediction, logged before anything is decoded; the proof
that greedy speculative output equals greedy plain output in float32; then plain, speculative and transformers decoding,
interleaved prompt by prompt, each prompt continued by as many tokens as the target's own answer has.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

import speculative
from data.responses import Response, read_shards
from pipeline import distil, held_out, race, trainer
from pipeline import draft as drafts
from pipeline.calibrate import costs_of, suffix
from pipeline.config import Stage
from pipeline.context import Context
from pipeline.errors import PipelineError
from pipeline.expand import expand
from pipeline.hardware import machine
from pipeline.statistics import median_interval
from pipeline.tracking import Run
from speculative import Draft, Sampling
from speculative.cost import Costs, best_length, expected_ratio, rounds_needed

FORMAT = 1
LOSSLESS_BATCH = 8
SHORTEST = 16  # tokens; answers below this say more about prefill than about decoding


def identity(context: Context) -> dict[str, Any]:
    return {"decoding": asdict(context.config.decoding), "machine": machine(), "seed": context.config.seed}


def run(context: Context, folder: Path, child: Run) -> tuple[dict[str, float], dict[str, Any]]:
    config = context.config.decoding
    responses = list(read_shards(context.parent(Stage.generate).folder))
    target = context.target.load(context.dtype)
    folder_of_draft = context.parent(Stage.distil).folder / "draft"
    draft = drafts.load(folder_of_draft, context.dtype)
    initial, _ = distil.initial(context)
    before = Draft(initial.model.to(context.dtype), initial.vocabulary)
    calibration = context.parent(Stage.calibrate).details
    metrics: dict[str, float] = {}
    details: dict[str, Any] = {"by_temperature": {}}

    plans = []
    for temperature in config.temperatures:
        sampling = Sampling(temperature, config.top_k, config.top_p)
        texts = held_out.of_split(responses, "test", temperature)
        if not texts:
            raise PipelineError(f"corpus.test={context.config.corpus.test}: no test prompt has an answer at {temperature:g}")
        agreements = held_out.measure(target, [before, draft], texts, sampling, f"agreement at {temperature:g}")
        costs = costs_of(calibration, temperature)
        recommended = _recommend(draft, target, held_out.of_split(responses, "validation", temperature), sampling, costs)
        length = config.draft_tokens or max(recommended, 1)  # K = 0 would leave nothing to measure
        plan = _plan(texts, agreements[1].acceptance, costs, length, sampling, context)
        plans.append(plan)
        end = suffix(temperature, config)
        metrics |= _alignment_metrics(agreements, end) | {
            f"speed/ratio_predicted{end}": plan["predicted"],
            f"draft_tokens{end}": length,
        }
        details["by_temperature"][f"{temperature:g}"] = {
            "before": {**agreements[0].means, "acceptance": agreements[0].overlap},
            "after": {**agreements[1].means, "acceptance": agreements[1].overlap},
            "positions": agreements[1].positions,
            "draft_tokens": length,
            "recommended_draft_tokens": recommended,
            "predicted": plan["predicted"],
            "tokens_per_round_predicted": plan["tokens_per_round_predicted"],
        }
    child.metrics(metrics)  # the prediction is on record before the first token is decoded
    del before, initial

    length = max(plan["draft_tokens"] for plan in plans)
    details["lossless"] = _lossless(context, folder_of_draft, responses, length)
    assistant = None
    if config.baselines:
        validation = [r for r in responses if r.request.split == "validation" and r.tokens]
        full = expand(drafts.load(folder_of_draft, torch.float32), ([*r.request.prompt, *r.tokens] for r in validation))
        assistant = full.model.to(context.dtype)
    module = race.Race(target, draft, assistant, context.config.seed)
    work = [item for plan in plans for item in plan["work"]]
    runner = trainer.make(context.config.trainer, folder)
    with trainer.interruptible(runner):
        runner.test(module, DataLoader(work, batch_size=None, collate_fn=lambda item: item), verbose=False)

    for plan in plans:
        end = suffix(plan["sampling"].temperature, config)
        entry = details["by_temperature"][f"{plan['sampling'].temperature:g}"]
        measured = race.summary(
            [row for row in module.rows if row["temperature"] == plan["sampling"].temperature], context.config.seed
        )
        entry |= measured
        metrics |= {f"{name}{end}": value for name, value in race.metrics(measured).items()}
    metrics["lossless/prompts"] = details["lossless"]["prompts"]
    metrics["lossless/different"] = details["lossless"]["different"]
    return metrics, details


def _recommend(draft: Draft, target: PreTrainedModel, texts: list[Response], sampling: Sampling, costs: Costs) -> int:
    """The K with the best predicted speed on validation text; the test prompts have no say in it."""
    [agreement] = held_out.measure(target, [draft], texts, sampling, f"K at {sampling.temperature:g}")
    return best_length(agreement.acceptance, costs)[0]


def _plan(
    texts: list[Response],
    acceptance: list[list[float]],
    costs: Costs,
    length: int,
    sampling: Sampling,
    context: Context,
) -> dict[str, Any]:
    """The prompts to time with their output lengths, and the prediction for exactly these."""
    config = context.config.decoding
    work: list[dict[str, Any]] = []
    rounds = tokens = 0.0
    ratios = []
    for text, probabilities in zip(texts, acceptance, strict=True):
        wanted = min(len(text.tokens), config.max_new_tokens)
        if wanted < min(SHORTEST, config.max_new_tokens) or len(work) == config.prompts:
            continue
        ratio = expected_ratio(probabilities[:wanted], costs, length)
        rounds += rounds_needed(probabilities[:wanted], length)
        tokens += wanted
        ratios.append(ratio)
        work.append(
            {
                "prompt": text.request.prompt,
                "id": text.request.prompt_id,
                "kind": text.request.kind,
                "key": text.request.key,
                "new_tokens": wanted,
                "draft_tokens": length,
                "sampling": sampling,
                "predicted": ratio,
            }
        )
    if not work:
        raise PipelineError(
            f"decoding.max_new_tokens={config.max_new_tokens}: no test answer at temperature {sampling.temperature:g} has "
            f"{SHORTEST} tokens; raise corpus.test or generate.max_new_tokens"
        )
    predicted, _, _ = median_interval(ratios, context.config.seed)
    return {
        "work": work,
        "sampling": sampling,
        "draft_tokens": length,
        "predicted": predicted,
        "tokens_per_round_predicted": tokens / rounds,
    }


def _lossless(context: Context, folder: Path, responses: list[Response], length: int) -> dict[str, Any]:
    """Greedy speculative against greedy plain, token for token, in float32, on every test prompt."""
    target = context.target.load(torch.float32)
    draft = drafts.load(folder, torch.float32)
    prompts = list({r.request.prompt_id: r.request.prompt for r in responses if r.request.split == "test"}.values())
    different = []
    for first in range(0, len(prompts), LOSSLESS_BATCH):
        batch = prompts[first : first + LOSSLESS_BATCH]
        limit = context.config.decoding.lossless_tokens
        plain = speculative.generate(target, batch, max_new_tokens=limit)
        fast = speculative.generate(target, batch, max_new_tokens=limit, draft=draft, num_draft_tokens=length)
        for place, (a, b) in enumerate(zip(plain.tokens, fast.tokens, strict=True)):
            if a != b:
                at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
                different.append({"prompt": first + place, "first_difference": at})
    return {"prompts": len(prompts), "different": len(different), "where": different, "draft_tokens": length}


def _alignment_metrics(agreements: list[held_out.HeldOut], end: str) -> dict[str, float]:
    before, after = (agreement.means for agreement in agreements)
    metrics = {f"alignment/{name}{end}": value for name, value in after.items()}
    return metrics | {f"alignment/{name}_before{end}": before[name] for name in ("forward_kl", "overlap", "top1")}
