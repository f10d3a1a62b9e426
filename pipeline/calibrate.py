"""Stage calibrate: what a draft step and a verification cost on this machine, and the agreement that breaks even.

Costs depend on the draft's shape and not on its weights, so the undistilled draft is timed, and all drafts of one shape
share one calibration.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import track

from data.responses import read_shards
from pipeline import held_out
from pipeline.config import Decoding, Stage
from pipeline.context import Context
from pipeline.errors import PipelineError
from pipeline.hardware import machine
from pipeline.proposer import prepared
from pipeline.tracking import Run
from pipeline.undistilled import draft_identity, initial
from speculative import MedusaHeads, Sampling, pack
from speculative.calibration import measure
from speculative.cost import Costs, break_even_overlap

FORMAT = 3
REPEATS = 7


def identity(context: Context) -> dict[str, Any]:
    config = context.config
    return {
        "target": context.target.fingerprint,
        "draft": draft_identity(config.draft),
        "decoding": {key: asdict(config.decoding)[key] for key in ("temperatures", "top_k", "top_p", "min_p", "longest_draft")},
        "machine": machine(),
        "precision": str(context.dtype),
        **context.target.padding,
    }


def run(context: Context, folder: Path, child: Run) -> tuple[dict[str, float], dict[str, Any]]:
    config = context.config.decoding
    responses = list(read_shards(context.parent(Stage.generate).folder))
    target = pack(context.target.load(context.dtype))
    undistilled, _ = initial(context)
    draft = prepared(undistilled, context.dtype)
    longest = min(config.longest_draft, draft.count) if isinstance(draft, MedusaHeads) else config.longest_draft
    details: dict[str, Any] = {"machine": machine(), "precision": str(context.dtype), "by_temperature": {}}
    metrics: dict[str, float] = {}
    steps = {}
    for temperature in config.temperatures:
        texts = held_out.of_split(responses, "validation", temperature)
        if len(texts) < 2:
            raise PipelineError(f"corpus.validation={context.config.corpus.validation}: calibration needs two or more answers")
        prompts = [text.request.prompt for text in texts]
        repeats = [prompts[i % len(prompts)] for i in range(REPEATS)]
        steps[temperature] = measure(target, draft, repeats, sampling_of(config, temperature), longest, context.target.ids)
    for temperature, costs in _in_turns(steps).items():
        entry = {"costs": asdict(costs), "break_even_overlap": break_even_overlap(costs)}
        details["by_temperature"][f"{temperature:g}"] = entry
        end = suffix(temperature, config)
        metrics |= {
            f"cost/draft_step{end}": costs.drafting(1),
            f"cost/plain_step_ms{end}": costs.plain_seconds * 1e3,
            f"cost/verify_{longest + 1}{end}": costs.verify[-1],
            f"break_even_overlap{end}": entry["break_even_overlap"],
        }
    return metrics, details


def _in_turns(steps: dict[float, Iterator[Costs]]) -> dict[float, Costs]:
    """The last costs of each temperature, measured in turns: what else the machine does then meets all of them alike."""
    costs: dict[float, Costs] = {}
    for _ in track(range(REPEATS - 1), description=f"{'calibrate':<28}", transient=True):
        costs = {temperature: next(following) for temperature, following in steps.items()}
    return costs


def sampling_of(config: Decoding, temperature: float) -> Sampling:
    return Sampling(temperature, config.top_k, config.top_p, config.min_p)


def suffix(temperature: float, config: Decoding) -> str:
    """Metrics of the first decoding temperature carry the plain name, others end in ``_at_T``."""
    return "" if temperature == config.temperatures[0] else f"_at_{temperature:g}"


def costs_of(details: dict[str, Any], temperature: float) -> Costs:
    """The costs that ``run`` stored for one temperature."""
    return Costs.stored(details["by_temperature"][f"{temperature:g}"]["costs"])
