"""What changes logits by looking at the text so far: penalties, biases, a shortest length, transformers' processors.

They come before temperature and filters, at every position of a block, with the drafts inside the block as part of the
text; so a drafted token is judged by exactly the distribution that plain decoding would have had there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

Processor = Callable[[Tensor, Tensor], Tensor]  # ids (1, t), logits (1, V) → logits (1, V): transformers' convention


@dataclass(frozen=True)
class Controls:
    """``repetition_penalty`` divides positive and multiplies negative logits of tokens in prompt or output (Keskar,
    1909.05858); ``presence_penalty`` and ``frequency_penalty`` are subtracted for tokens of the output, once or by count.

    ``min_new_tokens`` bars EOS ids before that length; ``logit_bias`` is added by token id; ``processors`` are called
    last, for one row at a time. A processor must be a pure function of its arguments.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    processors: Sequence[Processor] = ()

    def __post_init__(self) -> None:
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty must be a finite number above 0, not {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) < float("inf"):
                raise ValueError(f"{name} must be a finite number, not {getattr(self, name)}")
        if self.min_new_tokens < 0:
            raise ValueError(f"min_new_tokens must be ≥ 0, not {self.min_new_tokens}")
        for token, bias in self.logit_bias.items():
            if token < 0 or not bias < float("inf"):
                raise ValueError(f"logit_bias needs token ids ≥ 0 and numbers below infinity, not {token}: {bias}")

    @property
    def active(self) -> bool:
        return self != Controls()

    def check_pure(self, ids: Tensor, logits: Tensor) -> None:
        """Try every processor on one text (1, t) and logits (1, V).

        Raises:
            ValueError: a processor that answers differently the second time keeps a state of its own, and drafts that are
                rejected later would spoil it.
        """
        for processor in self.processors:
            first = processor(ids, logits.clone())
            processor(ids[:, :-1] if ids.shape[1] > 1 else ids, logits.clone())
            if first.shape != logits.shape or not torch.equal(first, processor(ids, logits.clone())):
                raise ValueError(
                    f"processor {type(processor).__name__}: its answer changes from call to call; "
                    "speculative decoding cannot be exact with it"
                )


@dataclass(frozen=True)
class History:
    """The controls of a batch of rows: ``prompts`` (B,) is where each prompt ends, ``eos`` the ids that end a row."""

    controls: Controls
    prompts: Tensor
    eos: Tensor
    vocabulary_size: int

    def apply(self, logits: Tensor, tokens: Tensor, lengths: Tensor, live: Tensor | None = None) -> Tensor:
        """Logits (B, V) for position ``lengths`` (B,) of ``tokens`` (B, capacity), whose earlier positions are the text.

        Rows that are not ``live`` (B,) keep theirs, and no processor sees their text; None: all are.
        """
        controls = self.controls
        live = torch.ones_like(lengths, dtype=torch.bool) if live is None else live
        given, logits = logits.float(), logits.float().clone()
        if controls.logit_bias:
            ids = torch.tensor(list(controls.logit_bias), device=logits.device)
            logits[:, ids] += torch.tensor(list(controls.logit_bias.values()), device=logits.device)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        said = place < lengths[:, None]
        if controls.repetition_penalty != 1.0:
            seen = _counts(tokens, said, logits.shape[1]) > 0
            punished = torch.where(logits > 0, logits / controls.repetition_penalty, logits * controls.repetition_penalty)
            logits = torch.where(seen, punished, logits)
        if controls.presence_penalty or controls.frequency_penalty:
            counts = _counts(tokens, said & (place >= self.prompts[:, None]), logits.shape[1])
            logits -= controls.presence_penalty * (counts > 0) + controls.frequency_penalty * counts
        early = (lengths - self.prompts < controls.min_new_tokens).nonzero()
        if len(early) and len(self.eos):
            logits[early, self.eos] = -torch.inf
        for processor in controls.processors:
            for i in live.nonzero().flatten().tolist():
                logits[i] = processor(tokens[i : i + 1, : int(lengths[i])], logits[i : i + 1].clone())[0]
        return torch.where(live[:, None], logits, given)

    def select(self, rows: Tensor) -> "History":
        """The history of the given rows of the batch."""
        return replace(self, prompts=self.prompts[rows])


def _counts(tokens: Tensor, counted: Tensor, size: int) -> Tensor:
    """How often each id stands at a ``counted`` (B, capacity) place of each row, (B, size) float."""
    counts = torch.zeros(len(tokens), size, device=tokens.device)
    return counts.scatter_add_(1, tokens, counted.float())


def along_paths(
    history: History,
    logits: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    drafted: Tensor,
    paths: Sequence[Sequence[int]],
    alive: Tensor,
) -> Tensor:
    """The controls at every place of a block, (B, n, V) of ``logits`` (B, n, V): each sees the drafts that lead to it.

    ``paths[i]`` are the columns of ``drafted`` (B, N) between the committed text and place i; a path comes after the path
    that it continues. Logits stay as they are in rows that are not ``alive`` (B,), and behind a draft that is barred or ends
    the row: nothing there can stay, and a processor may allow no token at all after such a text.
    """
    live, found = {}, {}
    for place, path in enumerate(map(tuple, paths)):
        live[path] = alive
        if path:
            last, before = drafted[:, path[-1]], path[:-1]
            allowed = found[before].gather(1, last[:, None]).squeeze(1) > -torch.inf
            live[path] = live[before] & allowed & ~torch.isin(last, history.eos)
        found[path] = history.apply(logits[:, place], *behind(tokens, lengths, drafted, path), live[path])
    return torch.stack(list(found.values()), 1)


def behind(tokens: Tensor, lengths: Tensor, drafted: Tensor, path: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The text with the columns ``path`` of ``drafted`` (B, N) written behind it: ``tokens`` themselves, and lengths (B,)."""
    if path:
        places = lengths[:, None] + torch.arange(len(path), device=tokens.device)
        tokens.scatter_(1, places, drafted[:, list(path)])
    return tokens, lengths + len(path)
