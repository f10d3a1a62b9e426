"""Stage calibrate: what a draft step and a verification cost on this machine, and the K that they recommend.

K is chosen on validation text, at each decoding temperature; the test prompts have no say in it.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import track

from data.responses import read_shards
from pipeline import draft as drafts
from pipeline import held_out
from pipeline.config import Decoding, Stage
from pipeline.context import Context
from pipeline.errors import PipelineError
from pipeline.hardware import machine
from pipeline.tracking import Run
from speculative import Sampling
from speculative.calibration import measure
from speculative.cost import Costs, best_length, break_even_overlap

FORMAT = 1
REPEATS = 7


def identity(context: Context) -> dict[str, Any]:
    return {"decoding": _settings(context.config.decoding), "machine": machine(), "precision": str(context.dtype)}


def _settings(config: Decoding) -> dict[str, Any]:
    return {key: asdict(config)[key] for key in ("temperatures", "top_k", "top_p", "longest_draft")}


def run(context: Context, folder: Path, child: Run) -> tuple[dict[str, float], dict[str, Any]]:
    config = context.config.decoding
    responses = list(read_shards(context.parent(Stage.generate).folder))
    target = context.target.load(context.dtype)
    draft = drafts.load(context.parent(Stage.distil).folder / "draft", context.dtype)
    details: dict[str, Any] = {"machine": machine(), "precision": str(context.dtype), "by_temperature": {}}
    metrics: dict[str, float] = {}
    for temperature in config.temperatures:
        sampling = Sampling(temperature, config.top_k, config.top_p)
        texts = held_out.of_split(responses, "validation", temperature)
        if len(texts) < 2:
            raise PipelineError(f"corpus.validation={context.config.corpus.validation}: calibration needs two or more answers")
        prompts = [text.request.prompt for text in texts]
        repeats = [prompts[i % len(prompts)] for i in range(REPEATS)]
        title = f"calibrate at temperature {temperature:g}"
        steps = measure(target, draft, repeats, sampling, config.longest_draft)
        costs = list(track(steps, description=f"{title:<28}", total=REPEATS - 1, transient=True))[-1]
        [agreement] = held_out.measure(target, [draft], texts, sampling, "validation agreement")
        best, ratio = best_length(agreement.acceptance, costs)
        entry = {
            "costs": asdict(costs),
            "recommended_draft_tokens": best,
            "predicted_on_validation": ratio,
            "break_even_overlap": break_even_overlap(costs),
            "validation_overlap": agreement.overlap,
        }
        details["by_temperature"][f"{temperature:g}"] = entry
        end = suffix(temperature, config)
        metrics |= {
            f"cost/draft_step{end}": costs.draft,
            f"cost/plain_step_ms{end}": costs.plain_seconds * 1e3,
            f"cost/verify_{config.longest_draft + 1}{end}": costs.verify[-1],
            f"break_even_overlap{end}": entry["break_even_overlap"],
            f"draft_tokens{end}": best,
        }
    return metrics, details


def suffix(temperature: float, config: Decoding) -> str:
    """Metrics of the first decoding temperature carry the plain name, others end in ``_at_T``."""
    return "" if temperature == config.temperatures[0] else f"_at_{temperature:g}"


def costs_of(details: dict[str, Any], temperature: float) -> Costs:
    """The costs that ``run`` stored for one temperature."""
    stored = details["by_temperature"][f"{temperature:g}"]["costs"]
    return Costs(stored["plain_seconds"], stored["draft"], tuple(stored["verify"]), tuple(stored["other"]))
