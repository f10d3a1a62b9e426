"""Block rollouts: a draft continues the target's answers by a few tokens here and there, and the target says what follows.

Decoding starts every round on text that the target stands for, so only the drafted tokens inside a round are the draft's
own: token k + 1 is drafted behind k of them, and only if all k were kept. So a branch is as long as that, and what follows
its k-th token weighs Π min(1, p/q) over the first k, the chance that a round comes to it (at temperature 0: 1 or 0).
It knows no codec and no files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data.branches import TRUNK, Branched, beside
from data.draws import draw, uniforms
from data.responses import Response
from pipeline.forward import read_branches
from speculative import Draft, Sampling
from speculative.sampling import probabilities

KEYS = 1 << 33  # begins the keys of random numbers here, far from those of answers and of codecs
TOGETHER = 4  # answers that are read at once


@dataclass(frozen=True)
class Rolled:
    """An answer with its branches: ``tokens`` (T,), which begin at ``start``, and by token of a branch, (N,) each, where it
    left (``cuts``) and ``survival``. ``outputs`` (N, …): logits or states of the target behind each."""

    tokens: list[int]
    start: int
    cuts: Tensor
    survival: Tensor
    outputs: Tensor


@dataclass(frozen=True)
class Roller:
    """``draft`` continues each answer at ``starts`` places, by ``length`` tokens."""

    draft: Draft
    starts: int
    length: int
    seed: int

    @torch.inference_mode()
    def roll(self, model: PreTrainedModel, batch: Sequence[Response], hidden: bool, ids: int) -> list[Rolled]:
        """Branches of each answer, with the logits (N, V) of the target ``model`` behind them, or its ``hidden`` states (N, d).

        The first ``ids`` of V are the target's tokens.
        """
        return [
            rolled
            for first in range(0, len(batch), TOGETHER)
            for rolled in self._together(model, batch[first : first + TOGETHER], hidden, ids)
        ]

    def _together(self, model: PreTrainedModel, batch: Sequence[Response], hidden: bool, ids: int) -> list[Rolled]:
        trunks = [[*response.request.prompt, *response.tokens] for response in batch]
        cuts = [self._cuts(response) for response in batch]
        branches, chances = self._drafted(batch, trunks, cuts, ids)
        layout = beside(trunks, branches)
        found = []
        for row, outputs in enumerate(read_branches(model, layout, hidden)):
            own = layout.cuts[row] >= 0
            before = outputs[predecessors(layout, row)[own].to(outputs.device)]
            logits = (model.get_output_embeddings()(before) if hidden else before)[:, :ids]
            p = probabilities(logits.float(), Sampling(batch[row].request.temperature)).cpu()
            kept = p.gather(1, layout.tokens[row][own][:, None])[:, 0] / chances[row]
            survival = kept.clamp(max=1).view(-1, self.length).cumprod(1).flatten()
            tokens = layout.tokens[row][layout.cuts[row] >= TRUNK].tolist()
            cut = layout.cuts[row][own]
            found.append(Rolled(tokens, len(trunks[row]), cut, survival.float(), outputs[own.to(outputs.device)]))
        return found

    def _cuts(self, response: Response) -> list[int]:
        """Different places of the answer, in order, that depend on its key alone."""
        count = len(response.tokens)
        order = uniforms(self.seed, KEYS + response.request.key, count, 1)[:, 0].argsort()[: self.starts]
        return [len(response.request.prompt) + place for place in sorted(order.tolist())]

    def _drafted(
        self, batch: Sequence[Response], trunks: list[list[int]], cuts: list[list[int]], ids: int
    ) -> tuple[list[list[tuple[int, list[int]]]], list[Tensor]]:
        """The branches of each answer, and by its branch tokens the chance q (N,) with which each was drafted."""
        draft = self.draft.cut(ids)
        branches: list[list[tuple[int, list[int]]]] = [[(cut, []) for cut in places] for places in cuts]
        chances: list[list[Tensor]] = [[] for _ in batch]
        for step in range(self.length):
            layout = beside(trunks, branches)
            for row, logits in enumerate(read_branches(draft.model, layout, False)):
                request = batch[row].request
                last = torch.tensor([cut - 1 for cut in cuts[row]])
                if step:
                    last = len(trunks[row]) + torch.arange(len(cuts[row])) * step + step - 1
                guess = logits[last] if draft.outputs is None else logits[last][:, draft.outputs]
                q = probabilities(guess.float(), Sampling(request.temperature)).cpu()
                uniform = uniforms(self.seed, KEYS + request.key, len(last), step + 2)[:, step + 1 :]
                drawn = draw(q, uniform)
                chances[row].append(q.gather(1, drawn)[:, 0])
                chosen = drawn[:, 0] if draft.vocabulary is None else draft.vocabulary.cpu()[drawn[:, 0]]
                branches[row] = [
                    (cut, [*branch, token]) for (cut, branch), token in zip(branches[row], chosen.tolist(), strict=True)
                ]
        return branches, [torch.stack(found, 1).flatten() for found in chances]


def predecessors(layout: Branched, row: int) -> Tensor:
    """(T,) the column of a row that each token of a branch follows: the trunk's, or the branch's own; −1 of the others."""
    cuts, positions = layout.cuts[row], layout.positions[row]
    follows = torch.where(positions == cuts, cuts - 1, torch.arange(len(cuts)) - 1)
    return torch.where(cuts >= 0, follows, -1)
