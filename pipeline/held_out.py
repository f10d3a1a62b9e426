"""Agreement of target and draft on held-out text that the target generated, dense and teacher-forced.

For every response: the acceptance probability of a draft at each of its positions, under the very distributions that
decoding draws from, and the divergences at temperature 1 (at the decoding temperature if that is above 0).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel

from data.responses import Response
from speculative import Draft, Sampling, Typical
from speculative.alignment import Agreement, agreement
from speculative.sampling import probabilities
from speculative.typical import divergence, emitted, staying

DISTANCES = ("total_variation", "kl")


@dataclass(frozen=True)
class HeldOut:
    """``acceptance``: by response, by position; ``sums`` of each agreement measure over ``positions`` positions.

    Of Medusa heads both are the first head's; ``deeper`` is the acceptance of the others, by response, by head, by
    position, and ``by_head`` the mean measures of each. A draft model has neither: it is the same at all places of a round.
    ``loss``: means of what ``judged`` says of a lossy rule; empty of exact ones.
    """

    acceptance: list[list[float]]
    sums: dict[str, float]
    positions: int
    deeper: list[list[list[float]]]
    by_head: list[dict[str, float]] = field(default_factory=list)
    loss: dict[str, float] = field(default_factory=dict)

    @property
    def means(self) -> dict[str, float]:
        return {name: value / self.positions for name, value in self.sums.items()}

    @property
    def overlap(self) -> float:
        """Mean acceptance probability of one drafted token under the decoding distributions."""
        return sum(map(sum, self.acceptance)) / self.positions


@torch.inference_mode()
def measure(
    target: PreTrainedModel,
    drafts: Sequence[Draft],
    responses: Sequence[Response],
    sampling: Sampling,
    title: str,
    ids: int | None = None,
    typical: Typical | None = None,
) -> list[HeldOut]:
    """One HeldOut for each draft, all against one pass of the target; ``typical`` if drafts are judged by that rule.

    ``ids`` of the target have mass, rows of its head behind them are padding; None: all.
    """
    drafts = [draft if ids is None else draft.cut(ids) for draft in drafts]
    acceptance: list[list[list[float]]] = [[] for _ in drafts]
    losses: list[list[Tensor]] = [[] for _ in drafts]
    sums = [{measure.name: 0.0 for measure in fields(Agreement)} for _ in drafts]
    for response in track(responses, description=f"{title:<28}", transient=True):
        text = torch.tensor([response.request.prompt + response.tokens], device=target.device)
        keep = len(response.tokens) + 1
        logits = target(input_ids=text, logits_to_keep=keep, use_cache=False).logits[0, :-1, :ids].float()
        p = probabilities(logits, sampling)
        scale = 1.0 if sampling.greedy else sampling.temperature
        for place, draft in enumerate(drafts):
            guess = guesses(draft, text, keep).float()
            chances, loss = judged(p, probabilities(guess, sampling), draft.vocabulary, typical)
            acceptance[place].append(chances.tolist())
            losses[place].append(loss)
            measured = agreement(logits / scale, guess / scale, draft.vocabulary)
            for name in sums[place]:
                sums[place][name] += float(getattr(measured, name).double().sum())
    positions = sum(len(response.tokens) for response in responses)
    return [
        HeldOut(a, s, positions, [[] for _ in responses], loss=mean_loss(torch.cat(found)))
        for a, s, found in zip(acceptance, sums, losses, strict=True)
    ]


def judged(p: Tensor, q: Tensor, vocabulary: Tensor | None, typical: Typical | None) -> tuple[Tensor, Tensor]:
    """By position: the chance (N,) that a drafted token stays, and how far what is then emitted is from p, (N, DISTANCES).

    Of exact rules there is no distance, (N, 0).
    """
    if typical is None:
        return overlap(p, q, vocabulary), p.new_zeros(len(p), 0)
    chances = staying(p, q, vocabulary, typical).sum(-1)
    return chances, torch.stack(divergence(p, emitted(p, q, vocabulary, typical)), -1)


def mean_loss(loss: Tensor) -> dict[str, float]:
    """Means of what ``judged`` found at all positions, (N, DISTANCES) or (N, 0)."""
    return dict(zip(DISTANCES, loss.double().mean(0).tolist(), strict=False))


def guesses(draft: Draft, ids: Tensor, keep: int) -> Tensor:
    """The draft's logits (keep − 1, D) for the last ``keep`` − 1 of the target's ``ids`` (1, N)."""
    read = ids if draft.inputs is None else draft.inputs.to(ids.device)[ids]
    logits = draft.model(input_ids=read, logits_to_keep=keep, use_cache=False).logits[0, :-1]
    return logits if draft.outputs is None else logits[:, draft.outputs.to(ids.device)]


def overlap(p: Tensor, q: Tensor, vocabulary: Tensor | None) -> Tensor:
    """Σ min(p, q) by position, (N,); a rounded sum may come out a hair above 1, which no chance is."""
    return torch.minimum(p if vocabulary is None else p[:, vocabulary], q).sum(-1).clamp(max=1)


def by_kind(held: HeldOut, responses: Sequence[Response]) -> dict[str, dict[str, float]]:
    """By kind of prompt, the most frequent first: ``overlap`` as of all ``responses`` that were measured, and ``positions``."""
    skipped = 1 if held.by_head else 0  # heads draft from an answer's second token on
    chances: dict[str, list[float]] = {}
    for response, text in zip(responses, held.acceptance, strict=True):
        chances.setdefault(response.request.kind, []).extend(text[skipped:])
    found = sorted(((kind, some) for kind, some in chances.items() if some), key=lambda one: (-len(one[1]), one[0]))
    return {kind: {"overlap": sum(some) / len(some), "positions": len(some)} for kind, some in found}


def of_split(responses: Sequence[Response], split: str, temperature: float) -> list[Response]:
    """The non-empty responses of one split written at one temperature."""
    return [r for r in responses if r.tokens and r.request.split == split and r.request.temperature == temperature]
