"""What drafts are asked whatever their kind: a small model of its own, or Medusa heads on the target.

It knows how each kind is kept and described, and nothing of how it is made or trained.
"""

from pathlib import Path
from typing import Any

import torch

from pipeline import draft as drafts
from pipeline import heads as medusa_heads
from pipeline.draft import Shape
from pipeline.errors import PipelineError
from speculative import Draft, MedusaHeads, medusa, pack

Proposer = Draft | MedusaHeads


def shape(proposer: Proposer) -> Shape:
    return medusa_heads.shape(proposer) if isinstance(proposer, MedusaHeads) else drafts.shape(proposer)


def save(proposer: Proposer, folder: Path, target: str) -> None:
    """Write ``proposer`` into ``folder``; heads are marked as those of the target with the fingerprint ``target``."""
    if isinstance(proposer, MedusaHeads):
        medusa.save(proposer, folder, target)
    else:
        drafts.save(proposer, folder)


def load(folder: Path, dtype: torch.dtype, target: str) -> Proposer:
    """What ``save`` wrote, in eval mode.

    Raises:
        PipelineError: heads of another target.
    """
    if not (folder / medusa.CONFIG).is_file():
        return drafts.load(folder, dtype)
    try:
        return medusa.load(folder, target, dtype)
    except ValueError as error:
        raise PipelineError(f"draft.kind=medusa: {error}; distil heads for this target") from error


def prepared(proposer: Proposer, dtype: torch.dtype) -> Proposer:
    """``proposer`` itself as it is to decode: in the format ``dtype``, its weights packed."""
    pack((proposer if isinstance(proposer, MedusaHeads) else proposer.model).to(dtype))
    return proposer


def words(shape: dict[str, Any]) -> str:
    """A shape, as ``dataclasses.asdict`` gives it, in a few words."""
    size = f"vocabulary {shape['vocabulary']:,}"
    if shape.get("heads"):
        return f"{shape['heads']} Medusa heads on states of {shape['width']}, {size}"
    head = f", head of rank {shape['head_rank']:,}" if shape.get("head_rank") else ""
    return f"{shape['layers']} layers, width {shape['width']}, {size}{head}"
