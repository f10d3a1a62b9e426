"""What a draft will cost, said before it is trained: its size, the bytes a step reads, and the agreement it must reach.

Decoding one sequence reads every weight once a step, so bytes stand for time: c is the draft's bytes over the target's.
Verifying several positions is taken to cost one step. Both are what a machine does at best; calibration measures.
"""

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from pipeline.draft import Shape
from pipeline.proposer import shape
from speculative import Draft, MedusaHeads
from speculative.cost import Costs, break_even_overlap

LONGEST = 8  # the largest K considered


@dataclass(frozen=True)
class Outlook:
    """``draft`` and ``target`` shapes at ``bytes_each`` per parameter."""

    draft: Shape
    target: Shape
    bytes_each: int

    @property
    def costs(self) -> Costs:
        """Costs relative to a plain step, estimated from bytes."""
        ratio, heads = self.draft.read_per_step / self.target.read_per_step, self.draft.heads
        places = (heads or LONGEST) + 1
        each, once = (0.0, ratio) if heads else (ratio, 0.0)
        return Costs(plain_seconds=1.0, draft=each, verify=(1.0,) * places, other=(0.0,) * places, heads=once)

    @property
    def break_even(self) -> float:
        """The overlap below which no K can win, even at these costs."""
        return break_even_overlap(self.costs)

    def rows(self) -> list[tuple[str, str, str]]:
        """Name, draft, target."""
        names = ("heads" if self.draft.heads else "layers", "width", "vocabulary", "parameters")
        counted = [(name, f"{getattr(self.draft, name):,}", f"{getattr(self.target, name):,}") for name in names]
        if self.draft.head_rank:
            counted.append(("rank of the head", f"{self.draft.head_rank:,}", ""))
        read = [f"{one.read_per_step * self.bytes_each / 1e6:,.1f} MB" for one in (self.draft, self.target)]
        return [
            *counted,
            ("read by a step", *read),
            ("c, a step's cost (estimated from bytes)", f"{self.costs.drafting(1):.3f}", "1"),
            ("overlap to break even (at least)", f"{self.break_even:.3f}", ""),
        ]


def foresee(draft: Draft | MedusaHeads, target: PreTrainedModel, dtype: torch.dtype) -> Outlook:
    return Outlook(shape(draft), shape(Draft(target)), dtype.itemsize)


def show(outlook: Outlook) -> None:
    table = Table("before training", "draft", "target")
    for row in outlook.rows():
        table.add_row(*row)
    Console().print(table)
