"""What a pair of models promises, and what drafts that were distilled lack.

It brings the maths of ``pipeline.advice`` together with a sample, timings and stored curves; it prints nothing.
"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from data.responses import Response
from pipeline import advice, held_out, record, sample, tracking
from pipeline.config import Tracking
from pipeline.errors import PipelineError
from pipeline.executions import Record
from pipeline.server import UnreachableError
from pipeline.study import distinct
from speculative import Draft, Sampling
from speculative.cost import Costs, best_length, rounds_needed


def pair(
    target: PreTrainedModel, draft: Draft, answers: list[Response], longest: int, batches: list[int]
) -> list[dict[str, Any]]:
    """What two models promise, by temperature of the ``answers`` and batch, for K up to ``longest``."""
    times = sample.timed(target, draft, max(batches) * (longest + 1))
    rows = []
    for temperature in dict.fromkeys(answer.request.temperature for answer in answers):
        texts, sampling = [a for a in answers if a.request.temperature == temperature], Sampling(temperature)
        [found] = held_out.measure(target, [draft], texts, sampling, f"agreement at {temperature:g}")
        costs = sample.calibrated(target, draft, texts, sampling, longest)
        for batch in batches:
            promise = _promise(found.acceptance, advice.batched(costs, *times, batch))
            rows.append({"temperature": temperature, "batch": batch, "overlap": found.overlap, **promise})
    return rows


def _promise(acceptance: list[list[float]], costs: Costs) -> dict[str, Any]:
    """The best K ≥ 1 on these texts, what it yields, and whether it beats none."""
    tokens = sum(map(len, acceptance))
    per_round = {k: tokens / sum(rounds_needed(text, k) for text in acceptance) for k in range(1, costs.longest + 1)}
    ratios = {k: yielded / costs.round(k) for k, yielded in per_round.items()}
    length = max(ratios, key=ratios.__getitem__)
    return {
        "draft_tokens": length,
        "tokens_per_round": per_round[length],
        "ratio_predicted": ratios[length],
        "break_even_overlap": advice.needed_overlap(costs, 1.0),
        "worth_it": best_length(acceptance, costs)[0] > 0,
    }


def lack(config: Tracking, work: Path, wanted: str) -> list[tuple[str, advice.Lack | str]]:
    """What the drafts of a run, or of the jobs of a sweep, lack: (name, verdict, or why there is none).

    Raises:
        PipelineError: no such run, or none that tells a curve.
    """
    if config.uri is None and not (work / "mlflow.db").is_file():
        raise PipelineError(f"--work={work}: no store there; give paths.work of the run, or --uri")
    try:
        _, records = tracking.read(config, work, wanted, record.FILE)
    except UnreachableError as error:
        raise PipelineError(f"--uri={config.uri}: no server answers there; start it, or correct the address") from error
    if not any(found.document for found in records):
        raise PipelineError(f"--run={wanted}: no draft of it was measured; run its stages up to report")
    names = distinct([found.overrides or found.name for found in records])
    verdicts = [_verdict(found) for found in records]
    if all(isinstance(verdict, str) for verdict in verdicts):
        raise PipelineError(f"--run={wanted}: {'; '.join(dict.fromkeys(map(str, verdicts)))}")
    return list(zip(names, verdicts, strict=True))


def _verdict(found: Record) -> advice.Lack | str:
    if found.document is None:
        return f"not measured ({found.status})"
    if not found.document["training"]["epochs"]:
        return "it was measured as it is, nothing trained it here"
    try:
        return advice.lacking(_points(found.document), found.document["training"]["epochs"])
    except ValueError as error:
        return f"{error}; distil with a smaller trainer.validate_every"


def _points(document: dict[str, Any]) -> list[tuple[float, float]]:
    """(tokens trained on, overlap on validation text): of sampled text where there is some."""
    curves, training = document["curves"], document["training"]
    names = sorted(
        (name for name in curves if name.endswith("/overlap")), key=lambda name: (name == "validation-0/overlap", name)
    )
    steps = 1 + max((step for points in curves.values() for step, _ in points), default=0)
    each = training["epochs"] * training["train_positions"] / steps
    return [((step + 1) * each, overlap) for step, overlap in (curves[names[0]] if names else [])]
