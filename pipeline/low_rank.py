"""A head of low rank: logits = U (W h), so that a step reads r·(d + V) numbers in place of d·V and every id stays.

It begins as the best of its rank (Eckart & Young, 1936), in the norm of the hidden states where their second moment is
known: what counts is the error of logits, not of weights. Ranks of drafts' heads: SlimSpec (arXiv 2605.10453). Stock models
have one matrix there, so the product is multiplied out for them. It knows nothing of layers.
"""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.errors import PipelineError
from pipeline.narrow import principal_axes

DOWN = "down.weight"  # the first factor's name in a head's state dict


class LowRankHead(nn.Module):
    """``down`` (r, d), then ``up`` (V, r); both are plain linear layers, so they are packed and trained as others are."""

    def __init__(self, width: int, rank: int, rows: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, rows, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.up(self.down(hidden))

    @property
    def weight(self) -> Tensor:
        """The matrix (V, d) that the factors stand for, multiplied out at every call: a copy could be out of date."""
        return self.up.weight @ self.down.weight

    @property
    def rank(self) -> int:
        return self.down.out_features

    @property
    def rows(self) -> int:
        """V, which ``speculative.drafters.head_rows`` asks for."""
        return self.up.out_features

    @torch.no_grad()
    def approximate(self, matrix: Tensor, moment: Tensor) -> None:
        """Take the values nearest to ``matrix`` (V, d) over hidden states of second moment ``moment`` (d, d)."""
        up, down = factors(matrix, moment, self.rank)
        self.up.weight.copy_(up)
        self.down.weight.copy_(down)


def factors(matrix: Tensor, moment: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """U (V, r) and W (r, d) that minimise tr((A − UW) C (A − UW)ᵀ), A ``matrix`` (V, d), C ``moment`` (d, d); float64.

    That is the mean of ‖Ah − UWh‖² where C is the mean of hhᵀ. U W = A C^½ Q Qᵀ C^−½, Q the leading right singular
    vectors of A C^½ (Izenman, 1975). C must be positive definite. Column i of U is as long as row i of W, so that an
    optimizer's step of one length changes both alike.
    """
    values, axes = torch.linalg.eigh(moment.double())
    seen = matrix.double() @ (axes * values.sqrt()) @ axes.T
    leading = principal_axes(seen, rank)
    up, down = seen @ leading, leading.T @ (axes / values.sqrt()) @ axes.T
    lengths = up.norm(dim=0)
    balance = (lengths.clamp(min=1e-6 * float(lengths.max())) / down.norm(dim=1)).sqrt()
    return up / balance, down * balance[:, None]


@torch.no_grad()
def factor(model: PreTrainedModel, rank: int) -> None:
    """Replace the head of ``model`` by the nearest of ``rank``, in place.

    Raises:
        PipelineError: two factors of that rank are no smaller than the head.
    """
    matrix = model.get_output_embeddings().weight
    rows, width = matrix.shape
    most = (rows * width - 1) // (rows + width)
    if rank > most:
        raise PipelineError(
            f"draft.head_rank={rank}: no smaller than the full head of {rows:,} × {width:,}; give a number from 1 to {most}, "
            "or null for the full head"
        )
    head = LowRankHead(width, rank, rows)
    head.approximate(matrix, torch.eye(width))
    model.set_output_embeddings(head)


def rank_of(model: PreTrainedModel) -> int:
    """The rank of a head of two factors, 0 of one matrix."""
    head = model.get_output_embeddings()
    return head.rank if isinstance(head, LowRankHead) else 0


def make_room(model: PreTrainedModel, state: dict[str, Tensor]) -> None:
    """Give ``model`` a head of two factors where ``state``, its weights to be, has one."""
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    if f"{name}.{DOWN}" in state:
        rank, width = state[f"{name}.{DOWN}"].shape
        model.set_output_embeddings(LowRankHead(width, rank, len(head.weight)))


@torch.no_grad()
def multiplied_out(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose head is one matrix, as a stock model's; ``model`` itself where it has one already."""
    head = model.get_output_embeddings()
    if not isinstance(head, LowRankHead):
        return model
    made = copy.deepcopy(model)
    full = nn.Linear(head.down.in_features, head.rows, bias=False)
    full.weight.copy_(head.up.weight.double() @ head.down.weight.double())  # rounded once
    made.set_output_embeddings(full.to(head.up.weight))
    return made
