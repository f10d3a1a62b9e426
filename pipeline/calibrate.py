"""Stage calibrate: what a draft step and a verification cost on this machine, and the agreement that breaks even.

Costs depend on the draft's shape and not on its weights, so the undistilled draft is timed, and all drafts of one shape
share one calibration, however they are trained.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import track

from data.responses import read_shards
from pipeline import held_out, ready, trees
from pipeline.choices import Stage
from pipeline.config import Decoding
from pipeline.context import Context
from pipeline.errors import PipelineError
from pipeline.hardware import machine
from pipeline.spread import spread
from pipeline.tracking import Run
from pipeline.undistilled import draft_identity, initial
from speculative import MedusaHeads, Sampling
from speculative.calibration import measure
from speculative.cost import Costs, break_even_overlap
from speculative.tree_choice import TreeCosts

FORMAT = 8
REPEATS = 7
TRAINING = ("fit_head", "train_embedding")  # keys of a draft that shape no cost


def identity(context: Context) -> dict[str, Any]:
    config = context.config
    branches = {"tree_widths": list(trees.widths(config.decoding))} if trees.used(config.decoding) else {}
    return {
        "target": context.target.fingerprint,
        "draft": {key: value for key, value in draft_identity(config.draft).items() if key not in TRAINING},
        "decoding": {key: asdict(config.decoding)[key] for key in ("temperatures", "top_k", "top_p", "min_p", "longest_draft")},
        "machine": machine(),
        "precision": str(context.dtype),
        **branches,
        **({"compile": True} if config.decoding.compile else {}),
        **context.target.padding,
    }


def run(context: Context, folder: Path, child: Run) -> tuple[dict[str, float], dict[str, Any]]:
    config = context.config.decoding
    responses = list(read_shards(context.parent(Stage.generate).folder))
    target = ready.target(context)
    undistilled, _ = initial(context)
    draft = ready.draft(undistilled, context)
    longest = min(config.longest_draft, draft.count) if isinstance(draft, MedusaHeads) else config.longest_draft
    details: dict[str, Any] = {"machine": machine(), "precision": str(context.dtype), "by_temperature": {}}
    metrics: dict[str, float] = {}
    steps: dict[tuple[float, str], Iterator[Any]] = {}
    for temperature in config.temperatures:
        texts = held_out.of_split(responses, "validation", temperature)
        if len(texts) < 2:
            raise PipelineError(f"corpus.validation={context.config.corpus.validation}: calibration needs two or more answers")
        prompts = [text.request.prompt for text in spread(texts, REPEATS)]
        repeats = [prompts[i % len(prompts)] for i in range(REPEATS)]
        sampling = sampling_of(config, temperature)
        steps[temperature, "chain"] = measure(target, draft, repeats, sampling, longest, context.target.ids)
        if trees.used(config):
            steps[temperature, "tree"] = trees.calibrated(target, draft, repeats, sampling, config, context.target.ids)
    found = _in_turns(steps)
    for temperature in config.temperatures:
        costs = found[temperature, "chain"]
        entry = {"costs": asdict(costs), "break_even_overlap": break_even_overlap(costs)}
        details["by_temperature"][f"{temperature:g}"] = entry
        end = suffix(temperature, config)
        metrics |= {
            f"cost/draft_step{end}": costs.drafting(1),
            f"cost/plain_step_ms{end}": costs.plain_seconds * 1e3,
            f"cost/verify_{longest + 1}{end}": costs.verify[-1],
            f"break_even_overlap{end}": entry["break_even_overlap"],
        }
        if trees.used(config):
            branching: TreeCosts = found[temperature, "tree"]
            entry["tree_costs"] = asdict(branching)
            metrics |= {
                f"cost/tree_verify_{branching.largest}{end}": branching.verify[-1][1],
                f"cost/tree_draft_{branching.widest}{end}": branching.heads + branching.draft[-1][1],
            }
    return metrics, details


def _in_turns(steps: dict[tuple[float, str], Iterator[Any]]) -> dict[tuple[float, str], Any]:
    """The last costs of each, measured in turns: what else the machine does then meets all of them alike."""
    costs: dict[tuple[float, str], Any] = {}
    for _ in track(range(REPEATS - 1), description=f"{'calibrate':<28}", transient=True):
        costs = {wanted: next(following) for wanted, following in steps.items()}
    return costs


def sampling_of(config: Decoding, temperature: float) -> Sampling:
    return Sampling(temperature, config.top_k, config.top_p, config.min_p)


def suffix(temperature: float, config: Decoding) -> str:
    """Metrics of the first decoding temperature carry the plain name, others end in ``_at_T``."""
    return "" if temperature == config.temperatures[0] else f"_at_{temperature:g}"


def costs_of(details: dict[str, Any], temperature: float) -> Costs:
    """The costs that ``run`` stored for one temperature."""
    return Costs.stored(details["by_temperature"][f"{temperature:g}"]["costs"])


def tree_costs_of(details: dict[str, Any], temperature: float) -> TreeCosts:
    """The same of trees."""
    return TreeCosts.stored(details["by_temperature"][f"{temperature:g}"]["tree_costs"])
