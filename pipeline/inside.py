"""Which drafted tokens are accepted and which rejected, token by token, as coloured text.

Greedy decoding is fixed by the text that the target writes: a draft token stays if it is the next token of that text. So
one forward of the draft over an answer tells every round, and nothing need be decoded.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.responses import Response
from pipeline import held_out
from speculative import Draft, Sampling


class Kind(Enum):
    """What became of a token."""

    accepted = "#b7e4c7"  # drafted, and kept
    rejected = "#f4acb7"  # drafted, and replaced by the target's token that follows
    target = "#e9ecef"  # the target's own, at the end of every round


@dataclass(frozen=True)
class Mark:
    """A token and what became of it."""

    token: int
    kind: Kind


def rounds(tokens: Sequence[int], guesses: Sequence[int], drafts: int) -> list[list[Mark]]:
    """Greedy decoding of ``tokens`` at K = ``drafts``, round by round.

    Args:
        tokens: what the target writes.
        guesses: the draft's best id at each of these positions, given the text before it.
    """
    done: list[list[Mark]] = []
    start = 0
    while start < len(tokens):
        limit = min(drafts, len(tokens) - start - 1)  # as the engine: never more than are still wanted
        kept = next((m for m in range(limit) if guesses[start + m] != tokens[start + m]), limit)
        marks = [Mark(token, Kind.accepted) for token in tokens[start : start + kept]]
        if kept < limit:
            marks.append(Mark(guesses[start + kept], Kind.rejected))
        done.append([*marks, Mark(tokens[start + kept], Kind.target)])
        start += kept + 1
    return done


@torch.inference_mode()
def guesses(draft: Draft, answer: Response) -> list[int]:
    """The draft's best id at each position of ``answer``."""
    ids = torch.tensor([answer.request.prompt + answer.tokens], device=draft.model.device)
    best = held_out.guesses(draft, ids, len(answer.tokens) + 1).argmax(-1)
    return (best if draft.vocabulary is None else draft.vocabulary.to(best.device)[best]).tolist()


def chances(target: PreTrainedModel, draft: Draft, answer: Response, sampling: Sampling) -> list[float]:
    """The chance at each position of ``answer`` that a drafted token is accepted, Σ min(p, q)."""
    return held_out.measure(target, [draft], [answer], sampling, "acceptance")[0].acceptance[0]


@dataclass(frozen=True)
class Text:
    """Coloured text, which a notebook shows."""

    markup: str

    def _repr_html_(self) -> str:
        return self.markup


def coloured(done: Sequence[Sequence[Mark]], tokenizer: PreTrainedTokenizerBase) -> Text:
    """The rounds with their colours; a rejected token is struck through, and stands before what took its place."""
    spans = [_span(_words(mark.token, tokenizer), mark.kind.value, mark.kind) for marks in done for mark in marks]
    legend = " ".join(_span(kind.name, kind.value, kind) for kind in Kind)
    return Text(f"<p>{legend}</p><div style='white-space: pre-wrap; line-height: 1.7'>{''.join(spans)}</div>")


def shaded(tokens: Sequence[int], shades: Sequence[float], tokenizer: PreTrainedTokenizerBase) -> Text:
    """The tokens, the greener the likelier (0 … 1) a draft is accepted in their place; pointing at one tells its chance."""
    spans = [
        f"<span title='{chance:.2f}' style='color: black; background: rgba(64, 145, 108, {chance:.2f})'>"
        f"{_words(token, tokenizer)}</span>"
        for token, chance in zip(tokens, shades, strict=True)
    ]
    return Text(f"<div style='white-space: pre-wrap; line-height: 1.7'>{''.join(spans)}</div>")


def _words(token: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a token; a line break is shown, and made."""
    return html.escape(tokenizer.decode([token])).replace("\n", "↵\n")


def _span(text: str, colour: str, kind: Kind) -> str:
    struck = "; text-decoration: line-through" if kind is Kind.rejected else ""
    return f"<span class='{kind.name}' style='color: black; background: {colour}{struck}'>{text}</span>"
