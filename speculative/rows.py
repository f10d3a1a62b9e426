"""The rows of a batch: committed ids, budgets, and which event ends a row first.

Everything (B, …) is indexed by place in the live batch; ``index`` leads back to the caller's list, where the text of
rows that have left is kept.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum

import torch
from torch import Tensor

from speculative.verification import Verdict


class Finish(StrEnum):
    """Why a row ended: an EOS id, a stop string, or its budget."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"


Stop = Callable[[int, list[int]], int | None]  # row, its new ids → how many of them stay if the row ends among them


class Rows:
    """Mutable state of the rows being decoded."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        budgets: Sequence[int],
        capacity: int,
        keys: Sequence[int],
        device: torch.device,
    ) -> None:
        self.count = len(prompts)
        self._whole = torch.zeros(len(prompts), capacity, dtype=torch.long)
        for place, prompt in enumerate(prompts):
            self._whole[place, : len(prompt)] = torch.as_tensor(prompt)
        self._whole = self._whole.to(device)
        self._log_probs = torch.zeros(len(prompts), capacity, device=device)
        self._states: Tensor | None = None  # (rows, largest budget, width), once some are kept
        self._budgets = list(budgets)
        self._starts = [len(prompt) for prompt in prompts]
        self._ends = list(self._starts)
        self._finish = [Finish.LENGTH] * len(prompts)
        self.tokens = self._whole.clone()  # (B, capacity); beyond a row's length it is scratch
        self.lengths = torch.tensor(self._starts, device=device)  # (B,) committed ids
        self.prompts = self.lengths.clone()
        self.ends = self.lengths + torch.tensor(list(budgets), device=device)  # (B,) length at which the budget is spent
        self.keys = torch.tensor(list(keys), device=device)  # (B,) names for the random numbers
        self.index = torch.arange(len(prompts), device=device)
        self.alive = self.lengths < self.ends
        self.select(self.alive.nonzero().squeeze(1))

    def select(self, rows: Tensor) -> None:
        """Keep the given places of the batch; the text of the others is put aside."""
        self._whole[self.index] = self.tokens
        for name in ("tokens", "lengths", "prompts", "ends", "keys", "index", "alive"):
            setattr(self, name, getattr(self, name)[rows])

    def commit(self, block: Tensor, verdict: Verdict, eos: Tensor, stop: Stop | None) -> Tensor:
        """Append accepted drafts and the token after them, cut at the earliest of EOS, stop and budget.

        ``block`` (B, K+1) is the anchor and the drafts. Returns the tokens emitted by row (B,), 0 for rows that were done
        before.
        """
        place = torch.arange(block.shape[1], device=block.device)
        new = torch.cat([block[:, 1:], block[:, :1]], 1)  # the last column is overwritten when every draft was accepted
        new.scatter_(1, verdict.accepted[:, None], verdict.following[:, None])
        self.tokens.scatter_(1, self.lengths[:, None] + place, new)
        emitted = torch.minimum(verdict.accepted + 1, self.ends - self.lengths)
        is_eos = torch.isin(new, eos) & (place < emitted[:, None])
        at_eos = is_eos.any(-1) & self.alive
        emitted = torch.where(at_eos, is_eos.long().argmax(-1) + 1, emitted) * self.alive
        reasons = [Finish.EOS if ended else None for ended in at_eos.tolist()]
        if stop is not None:
            emitted = self._stopped(new, emitted, stop, reasons)
        self.lengths = self.lengths + emitted
        self._end(emitted, reasons)
        return emitted

    def _stopped(self, new: Tensor, emitted: Tensor, stop: Stop, reasons: list[Finish | None]) -> Tensor:
        counts = emitted.tolist()
        for place, (row, ids, count) in enumerate(zip(self.index.tolist(), new.tolist(), counts, strict=True)):
            kept = stop(row, ids[:count]) if count else None
            if kept is not None:
                # A stop string that an EOS id completes would end the row there anyway.
                reasons[place] = reasons[place] if reasons[place] and kept == count else Finish.STOP
                counts[place] = kept
        return torch.tensor(counts, device=emitted.device)

    def _end(self, emitted: Tensor, reasons: list[Finish | None]) -> None:
        ended = torch.tensor([reason is not None for reason in reasons], device=emitted.device)
        for row, length, reason in zip(self.index.tolist(), self.lengths.tolist(), reasons, strict=True):
            self._ends[row] = length
            if reason is not None:
                self._finish[row] = reason
        self.alive = self.alive & ~ended & (self.lengths < self.ends)

    def note(self, before: Tensor, emitted: Tensor, logits: Tensor) -> None:
        """Keep the log-probabilities, under ``logits`` (B, K+1, V), of the ``emitted`` (B,) tokens after ``before`` (B,)."""
        place = torch.arange(logits.shape[1], device=logits.device)
        slots = before[:, None] + place
        found = logits.float().log_softmax(-1).gather(2, self.tokens.gather(1, slots)[..., None]).squeeze(-1)
        kept = place < emitted[:, None]
        rows = self.index[:, None].expand_as(slots)
        self._log_probs[rows[kept], slots[kept]] = found[kept]

    def note_states(self, before: Tensor, emitted: Tensor, states: Tensor) -> None:
        """Keep the ``states`` (B, K+1, width) that led to the ``emitted`` (B,) tokens after ``before`` (B,)."""
        if self._states is None:
            self._states = states.new_zeros(self.count, max(self._budgets), states.shape[-1])
        place = torch.arange(states.shape[1], device=states.device)
        slots = (before - self.prompts)[:, None] + place
        kept = place < emitted[:, None]
        rows = self.index[:, None].expand_as(slots)
        self._states[rows[kept], slots[kept]] = states[kept]

    def states(self) -> list[Tensor]:
        """What ``note_states`` kept, (new tokens, width) by row in the caller's order."""
        counts = [end - start for start, end in zip(self._starts, self._ends, strict=True)]
        if self._states is None:  # nothing was written
            return [torch.zeros(0, 0) for _ in counts]
        return [self._states[row, :count] for row, count in enumerate(counts)]

    def news(self, before: Tensor, emitted: Tensor) -> list[tuple[int, list[int], Finish | None]]:
        """(row, new ids, why it ended or None) of the rows that were alive."""
        found = []
        counts = zip(self.index.tolist(), before.tolist(), emitted.tolist(), self.alive.tolist(), strict=True)
        for place, (row, start, count, alive) in enumerate(counts):
            if count:
                ids = self.tokens[place, start : start + count].tolist()
                found.append((row, ids, None if alive else self._finish[row]))
        return found

    def texts(self) -> tuple[list[list[int]], list[Finish], list[list[float]]]:
        """New ids, reasons and log-probabilities of all rows, in the caller's order."""
        self._whole[self.index] = self.tokens
        spans = list(zip(self._starts, self._ends, strict=True))
        tokens = [self._whole[row, start:end].tolist() for row, (start, end) in enumerate(spans)]
        log_probs = [self._log_probs[row, start:end].tolist() for row, (start, end) in enumerate(spans)]
        return tokens, list(self._finish), log_probs
