"""Medusa heads as a draft: made from the target's head, and held to the target's own distributions further on.

Head k at state H_j is to say what the target will say of the token k further on: softmax(W H_{j+k}) over the draft's ids
(Cai et al., Medusa, 2401.10774; there it is the token that was written). It knows no files and no training loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel

from data.hidden_rows import HiddenBatch
from data.responses import Response
from pipeline.draft import Shape
from pipeline.errors import PipelineError
from pipeline.held_out import HeldOut, judged, mean_loss
from pipeline.losses import Support
from speculative import MedusaHeads, Sampling, Typical
from speculative.alignment import Agreement, agreement
from speculative.sampling import probabilities

_POSITIONS = 256  # whose logits over all ids are held at once
Compared = tuple[Tensor, Tensor, Agreement]  # chances, losses (see held_out.judged) and agreement, by position


@torch.no_grad()
def build(target: PreTrainedModel, count: int, vocabulary: Tensor | None) -> MedusaHeads:
    """``count`` float32 heads that repeat what the target says of the next token."""
    rows = target.get_output_embeddings().weight
    rows = rows if vocabulary is None else rows[vocabulary]
    heads = MedusaHeads(count, rows.shape[1], len(rows), vocabulary)
    heads.matrix.weight.copy_(rows)
    return heads.eval()


def shape(heads: MedusaHeads) -> Shape:
    parameters = sum(p.numel() for p in heads.parameters())
    return Shape(0, heads.width, heads.size, parameters, parameters, heads.count)


def log_q(heads: MedusaHeads, batch: HiddenBatch, depths: Sequence[int]) -> Tensor:
    """Log-probabilities (M, D) of heads ``depths`` (1 is the first) wherever their row goes on far enough; head by head."""
    seen = [heads.seen(depth - 1, batch.states[batch.ahead(depth)[0]]) for depth in depths]
    return heads.matrix(torch.cat(seen)).float().log_softmax(-1)


@dataclass(frozen=True)
class Truth:
    """The target at N positions over the D ids of the draft.

    ``log_p`` (N, D); ``best`` (N,) is the draft id of the target's best id of all, −1 where the draft lacks it.
    """

    log_p: Tensor
    best: Tensor

    def support(self, places: Tensor) -> Support:
        """The distributions at ``places`` (M,), the target's best id in front."""
        best, p = self.best[places, None], self.log_p[places].exp()
        ids = torch.arange(p.shape[1], device=p.device).expand_as(p)
        first = torch.where(best >= 0, p.gather(1, best.clamp(min=0)), 0.0)
        rest = p.scatter(1, best.clamp(min=0), torch.where(best >= 0, 0.0, p[:, :1]))
        return Support(torch.cat([best.clamp(min=0), ids], 1), torch.cat([first, rest], 1), torch.zeros_like(first[:, 0]))


def normaliser(states: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """log Σ exp of the logits of a head (V, d) after ``states`` (N, d), over all its ids, and the best id, (N,) each."""
    found = []
    for some in states.split(_POSITIONS):
        logits = torch.nn.functional.linear(some, weight, bias).float()
        found.append((logits.logsumexp(-1), logits.argmax(-1)))
    totals, best = zip(*found, strict=True)
    return torch.cat(totals), torch.cat(best)


@torch.inference_mode()
def measure(
    target: PreTrainedModel,
    drafts: Sequence[MedusaHeads],
    responses: Sequence[Response],
    sampling: Sampling,
    title: str,
    ids: int | None = None,
    typical: Typical | None = None,
) -> list[HeldOut]:
    """Agreement of each of ``drafts`` with the target, as ``held_out.measure`` has it; means are those of the first head.

    Raises:
        PipelineError: no answer has a second token.
    """
    counts = [len(response.tokens) for response in responses]
    if max(counts) < 2:
        raise PipelineError("corpus: Medusa heads draft from an answer's second token on, and no held-out answer has one")
    kept = [heads.size if ids is None else heads.below(ids) for heads in drafts]
    parts: list[list[list[Compared]]] = [[[] for _ in heads.blocks] for heads in drafts]
    for response in track(responses, description=f"{title:<28}", transient=True):
        text = torch.tensor([response.request.prompt + response.tokens], device=target.device)
        states = target.base_model(input_ids=text, use_cache=False).last_hidden_state[0, -len(response.tokens) - 1 : -1]
        logits = target.get_output_embeddings()(states)[:, :ids].float()
        for found, heads, outputs in zip(parts, drafts, kept, strict=True):
            vocabulary = None if heads.vocabulary is None else heads.vocabulary[:outputs]
            for depth, of_depth in enumerate(found, start=1):
                guess = heads.matrix(heads.seen(depth - 1, states[: max(len(states) - depth, 0)]))[:, :outputs].float()
                of_depth.append(_compared(logits[depth:], guess, sampling, vocabulary, typical))
    return [_held_out(found, counts) for found in parts]


def _compared(
    logits: Tensor, guess: Tensor, sampling: Sampling, vocabulary: Tensor | None, typical: Typical | None
) -> Compared:
    """What ``held_out.judged`` says under the distributions that decoding draws from, and agreement as ``held_out`` has it."""
    scale = 1.0 if sampling.greedy else sampling.temperature
    found = judged(probabilities(logits, sampling), probabilities(guess, sampling), vocabulary, typical)
    return *found, agreement(logits / scale, guess / scale, vocabulary)


def _held_out(found: list[list[Compared]], counts: list[int]) -> HeldOut:
    # The first tokens of an answer come before the state that head k would draft them from: they are never drafted.
    levels = [
        [[0.0] * min(depth, count) + accepted.tolist() for (accepted, *_), count in zip(of_depth, counts, strict=True)]
        for depth, of_depth in enumerate(found, start=1)
    ]
    by_depth = [
        {field.name: torch.cat([getattr(one, field.name) for *_, one in of_depth]) for field in fields(Agreement)}
        for of_depth in found
    ]
    deeper = [[level[text] for level in levels[1:]] for text in range(len(counts))]
    means = [{name: float(values[name].double().mean()) for name in ("overlap", "top1", "forward_kl")} for values in by_depth]
    sums = {name: float(value.double().sum()) for name, value in by_depth[0].items()}
    loss = mean_loss(torch.cat([one for _, one, _ in found[0]]))
    return HeldOut(levels[0], sums, len(by_depth[0]["top1"]), deeper, means, loss)
