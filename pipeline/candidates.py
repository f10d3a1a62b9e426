"""Which drafts of a target are worth distilling: what each shape costs, can reach, and must reach.

One shape is timed, the others are reckoned from what they read. What overlap a shape will come to, only distilling tells:
it is supposed for drafts as deep as the timed one, and of all others is said which overlap would make them as fast.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data.responses import Response
from pipeline import advice, sample
from pipeline import draft as drafts
from pipeline.config import Draft as DraftConfig
from speculative import Draft, Sampling, pack
from speculative.cost import Costs, needed_overlap

LAYERS = (1, 2, 4)
VOCABULARIES = (4096, 8192, 16384)


@dataclass(frozen=True)
class Candidate:
    """A shape to try. ``cost``: of a draft step, in plain steps of one row; ``ceiling``: overlap that its ids leave.

    By batch: ``costs``, and the ``best`` K with its ratio at the supposed overlap, (0, 1) if no K wins. ``to_match``: the
    overlap at which it is as fast as the first candidate; None if it never is.
    """

    layers: int
    vocabulary: int
    read_per_step: int
    cost: float
    ceiling: float
    costs: dict[int, Costs] = field(repr=False)
    best: dict[int, tuple[int, float]]
    to_match: float | None = None

    def to_break_even(self, batch: int) -> float | None:
        """The overlap from which on some K wins; None if none ever does."""
        return needed_overlap(self.costs[batch], 1.0)


def find(
    target: PreTrainedModel,
    plain: PreTrainedModel,
    answers: list[Response],
    longest: int,
    batches: list[int],
    overlap: float,
) -> list[Candidate]:
    """Candidates, the one to begin with first: as deep as the timed one, and the fastest of these at the least batch.

    Args:
        target: the target as it will decode.
        plain: the same with its weights as they were loaded, which the timed draft is cut from.
        longest: the largest K.
        overlap: what a draft as deep as the timed one is supposed to reach, as a share of what its ids leave.
    """
    ranked, law = _laws(target, answers)
    timed = _time(target, plain, ranked, answers, longest, max(batches))
    shapes = [(layers, ids) for layers in timed.depths for ids in timed.sizes]
    found = [_candidate(timed, *shape, float(law[ranked[: shape[1]]].sum()), batches, overlap) for shape in shapes]
    least = min(batches)
    first = max((one for one in found if one.layers == timed.shape.layers), key=lambda one: one.best[least][1])
    goal = first.best[least][1]
    ordered = [first, *(one for one in found if one is not first)]
    return [replace(one, to_match=needed_overlap(one.costs[least], goal)) for one in ordered]


def _laws(target: PreTrainedModel, answers: list[Response]) -> tuple[Tensor, Tensor]:
    """Ids by their mean probability on the answers to half of the prompts, and that probability on the other half."""
    keys = sorted({answer.request.key for answer in answers})
    first = set(keys[::2])
    chosen = sample.mean_law(target, [answer for answer in answers if answer.request.key in first])
    law = sample.mean_law(target, [answer for answer in answers if answer.request.key not in first])
    return chosen.argsort(descending=True), law


@dataclass(frozen=True)
class _Timed:
    """The draft that was timed, and what others are reckoned from: parameters of a ``layer`` and of a ``row`` of the head."""

    shape: drafts.Shape
    costs: Costs
    times: tuple[advice.Times, advice.Times]
    target_read: int
    layer: int
    row: int
    depths: list[int]
    sizes: list[int]


def _time(
    target: PreTrainedModel, plain: PreTrainedModel, ranked: Tensor, answers: list[Response], longest: int, batch: int
) -> _Timed:
    size, depth = len(ranked), target.config.num_hidden_layers
    sizes = [ids for ids in VOCABULARIES if ids < size] or [max(size // 4, 2), max(size // 2, 2)]
    depths = [layers for layers in LAYERS if layers < depth] or [depth]
    ids = ranked[: sizes[len(sizes) // 2]].sort().values
    made = drafts.build(plain, DraftConfig(layers=list(range(depths[:2][-1]))), ids)
    shape, layer = drafts.shape(made), _layer(made.model)
    draft = Draft(pack(made.model.to(target.dtype)), made.vocabulary)
    return _Timed(
        shape,
        sample.calibrated(target, draft, answers, Sampling(answers[0].request.temperature), longest),
        sample.timed(target, draft, batch * (longest + 1)),
        target_read=drafts.shape(Draft(plain)).read_per_step,
        layer=layer,
        row=target.config.hidden_size,
        depths=depths,
        sizes=[*sizes, size],
    )


def _layer(model: PreTrainedModel) -> int:
    """Parameters of one layer."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == model.config.num_hidden_layers]
    return sum(p.numel() for p in lists[0][0].parameters())


def _candidate(timed: _Timed, layers: int, vocabulary: int, ceiling: float, batches: list[int], overlap: float) -> Candidate:
    shape = timed.shape
    read = shape.read_per_step + (layers - shape.layers) * timed.layer + (vocabulary - shape.vocabulary) * timed.row
    own = advice.resized(timed.costs, read, shape.read_per_step, timed.target_read)
    costs = {batch: advice.batched(own, *timed.times, batch) for batch in batches}
    best = {batch: advice.best_at(of_batch, overlap * ceiling) for batch, of_batch in costs.items()}
    return Candidate(layers, vocabulary, read, own.draft, ceiling, costs, best)
