"""What changes logits by looking at the text so far: penalties, biases, a shortest length, transformers' processors.

They come before temperature and filters, at every position of a block, with the drafts inside the block as part of the
text; so a drafted token is judged by exactly the distribution that plain decoding would have had there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

Processor = Callable[[Tensor, Tensor], Tensor]  # ids (1, t), logits (1, V) → logits (1, V): transformers' convention
Control = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits (B, V), tokens (B, capacity), lengths (B,) → logits (B, V)


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

    def apply(self, logits: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Logits (B, V) for position ``lengths`` (B,) of ``tokens`` (B, capacity), whose earlier positions are the text."""
        controls = self.controls
        logits = logits.float().clone()
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
            rows = [processor(tokens[i : i + 1, : int(n)], logits[i : i + 1].clone()) for i, n in enumerate(lengths)]
            logits = torch.cat(rows)
        return logits

    def select(self, rows: Tensor) -> "History":
        """The history of the given rows of the batch."""
        return replace(self, prompts=self.prompts[rows])


def _counts(tokens: Tensor, counted: Tensor, size: int) -> Tensor:
    """How often each id stands at a ``counted`` (B, capacity) place of each row, (B, size) float."""
    counts = torch.zeros(len(tokens), size, device=tokens.device)
    return counts.scatter_add_(1, tokens, counted.float())


def along_paths(
    control: Control, logits: Tensor, tokens: Tensor, lengths: Tensor, drafted: Tensor, paths: Sequence[Sequence[int]]
) -> Tensor:
    """The controls at every place of a block, (B, n, V) of ``logits`` (B, n, V): each sees the drafts that lead to it.

    ``paths[i]`` are the columns of ``drafted`` (B, N) between the committed text and place i. They are written behind the
    ``lengths`` (B,) of ``tokens`` (B, capacity), which is scratch.
    """
    parts = []
    for place, path in enumerate(paths):
        if path:
            behind = lengths[:, None] + torch.arange(len(path), device=tokens.device)
            tokens.scatter_(1, behind, drafted[:, list(path)])
        parts.append(control(logits[:, place], tokens, lengths + len(path)))
    return torch.stack(parts, 1)
