"""In the place of stage distil where a draft is measured as it is: the draft at ``draft.path``, and its shape.

Nothing is trained, so no cache is read and the training prompts are not answered. What follows finds a draft as distil
leaves one, and a record that says of the training that there was none.
"""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pipeline import draft as drafts
from pipeline import outlook
from pipeline.context import Context
from pipeline.tracking import Run
from pipeline.undistilled import cut_from, draft_identity
from speculative import Draft

FORMAT = 1
UNTRAINED = {"train_rows": 0, "train_positions": 0, "epochs": 0.0, "best_step": 0}

log = logging.getLogger("draftsmith")


def identity(context: Context) -> dict[str, Any]:
    return {"target": context.target.fingerprint, "draft": draft_identity(context.config.draft), "as_it_is": True}


def run(context: Context, folder: Path, child: Run) -> tuple[dict[str, float], dict[str, Any]]:
    log.info("distil is not among stages: the draft at draft.path is measured as it is (add distil to train it further)")
    target = context.target.load(torch.float32)
    draft, coverage = cut_from(context, target)
    assert isinstance(draft, Draft)
    expected = outlook.foresee(draft, target, context.dtype)
    outlook.show(expected)
    drafts.save(draft, folder / "draft")
    metrics = {"draft/vocabulary_coverage": coverage, "draft/step_estimated": expected.costs.drafting(1)}
    details = {"shape": asdict(expected.draft), "vocabulary_coverage": coverage, "break_even_estimated": expected.break_even}
    return metrics, details | UNTRAINED | metrics
