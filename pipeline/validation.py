"""Agreement on validation text by position of each response: means, slices, and the speed that it promises.

Sums and counts are kept and divided last. Where the target's text is greedy, a draft token is accepted if both have the
same best one; else with probability Σ min(p, q) at temperature 1, whatever the temperature of decoding will be.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from data.artifact import fingerprint
from pipeline.losses import Support, forward_kl, overlap_at_least, top1
from speculative.cost import Costs, Deeper, rounds_needed

PLACES = (0, 16, 64, math.inf)  # positions in the response, from … up to
ENTROPIES = (0.0, 0.5, 2.0, math.inf)  # nats of the target
KINDS = 8  # of prompts that have a slice of their own, those with the most positions
LONGEST_NAME = 80  # characters of a kind in the name of a metric; MLflow takes 250 for all of it


@dataclass
class Tally:
    """What one validation text has shown so far; ``greedy``: it was written at temperature 0."""

    greedy: bool
    _parts: list[Tensor] = field(default_factory=list)  # (N, 5): overlap, top1, KL, place, entropy
    _rows: list[int] = field(default_factory=list)
    _kinds: list[str] = field(default_factory=list)

    def add(self, log_q: Tensor, target: Support, rows: list[int], kinds: Sequence[str], first: int = 0) -> None:
        """Count N positions, ``rows[i]`` of them in response i, in row-major order, from its token ``first`` on.

        ``kinds[i]`` is the kind of prompt that response i answers.
        """
        place = torch.cat([torch.arange(first, first + count, device=log_q.device) for count in rows]).to(log_q.dtype)
        values = (overlap_at_least(log_q, target), top1(log_q, target), forward_kl(log_q, target), place, entropy(target))
        self._parts.append(torch.stack([value.to(log_q.dtype) for value in values], 1).double().cpu())
        self._rows += rows
        self._kinds += kinds

    def means(self) -> dict[str, float]:
        """Overlap, top-1 agreement and forward KL; the overlap by place in the response, target entropy and kind of prompt."""
        table = torch.cat(self._parts)
        found = dict(zip(("overlap", "top1", "forward_kl"), table[:, :3].mean(0).tolist(), strict=True))
        found |= _slices(table, 3, "position", PLACES) | _slices(table, 4, "entropy", ENTROPIES)
        return found | _by_kind(table[:, 0].split(self._rows), self._kinds)

    def ratio(self, costs: Costs) -> float:
        """Plain time ÷ speculative time at the best K ≥ 1, as these positions promise at ``costs``.

        K = 0, which decoding may choose, would make all drafts equal that are not yet worth their cost.
        """
        texts = self.accepted()
        return promised(texts, [()] * len(texts), costs)

    def accepted(self) -> list[list[float]]:
        """The chance of a draft by response, by position."""
        chances = torch.cat(self._parts)[:, 1 if self.greedy else 0].clamp(0, 1)
        return [row.tolist() for row in chances.split(self._rows)]


@dataclass
class HeadTally:
    """The same of Medusa heads, a Tally for each; a text has no draft of head k for its first k tokens."""

    heads: list[Tally]
    _rows: list[int] = field(default_factory=list)

    def add(self, depth: int, log_q: Tensor, target: Support, rows: Sequence[int], kinds: Sequence[str]) -> None:
        """Count the positions at which head ``depth``, 1 the first, is judged.

        ``rows`` are the lengths of the responses, ``kinds`` the kinds of the prompts that they answer.
        """
        self.heads[depth - 1].add(log_q, target, [max(count - depth, 0) for count in rows], kinds, depth)
        self._rows += rows if depth == 1 else ()

    def means(self) -> dict[str, float]:
        """The first head's, and overlap and top-1 agreement of every head."""
        first, *others = [tally.means() for tally in self.heads]
        every = [(f"{name}_head_{k}", one[name]) for k, one in enumerate([first, *others], 1) for name in ("overlap", "top1")]
        return first | {name: value for name, value in every if math.isfinite(value)}  # of no position there is no mean

    def ratio(self, costs: Costs) -> float:
        """As a Tally's, each draft of a round being judged as its own head."""
        chances = [tally.accepted() for tally in self.heads]
        levels = [
            [[0.0] * (count - len(text)) + text for text, count in zip(texts, self._rows, strict=True)] for texts in chances
        ]
        return promised(levels[0], [[level[text] for level in levels[1:]] for text in range(len(self._rows))], costs)


def promised(texts: Sequence[Sequence[float]], deeper: Sequence[Deeper], costs: Costs) -> float:
    """Plain time ÷ speculative time at the best K ≥ 1, from chances by text (see ``speculative.cost.rounds_needed``)."""
    tokens = sum(map(len, texts))

    def at(drafts: int) -> float:
        rounds = sum(rounds_needed(text, drafts, more) for text, more in zip(texts, deeper, strict=True))
        return tokens / (rounds * costs.round(drafts))

    return max(at(drafts) for drafts in range(1, costs.longest + 1))


def entropy(target: Support) -> Tensor:
    """Nats of the target, (N,), all ids that are not stored or that the draft lacks being one outcome: a lower bound."""
    rest = (1 - target.p.sum(-1, keepdim=True)).clamp(min=0)
    return torch.special.entr(torch.cat([target.p, rest], 1)).sum(-1)


def _slices(table: Tensor, column: int, name: str, limits: tuple[float, ...]) -> dict[str, float]:
    """Mean overlap where ``column`` lies in [low, high); a slice without positions is left out."""
    found = {}
    for low, high in pairwise(limits):
        inside = (table[:, column] >= low) & (table[:, column] < high)
        if bool(inside.any()):
            found[f"overlap_{name}_{low:g}"] = float(table[inside, 0].mean())
    return found


def _by_kind(overlaps: Sequence[Tensor], kinds: Sequence[str]) -> dict[str, float]:
    """Mean overlap by kind of prompt, from the overlaps of each response; a kind without positions is left out."""
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for values, kind in zip(overlaps, kinds, strict=True):
        sums[kind] += float(values.sum())
        counts[kind] += len(values)
    most = sorted((kind for kind in counts if counts[kind]), key=lambda kind: (-counts[kind], kind))[:KINDS]
    return {f"overlap_kind_{name}": sums[kind] / counts[kind] for kind, name in zip(most, metric_names(most), strict=True)}


def metric_names(kinds: Sequence[str]) -> list[str]:
    """What each kind is called in the name of a metric: its letters and digits, for that is what MLflow takes everywhere.

    Kinds that would go by one name, or by none, are told apart by a hash.
    """
    plain = [re.sub(r"[^A-Za-z0-9.-]+", "_", kind).strip("_")[:LONGEST_NAME] for kind in kinds]
    shared = Counter(plain)
    return [
        name if name and shared[name] == 1 else f"{name}_{fingerprint(kind)[:6]}".lstrip("_")
        for kind, name in zip(kinds, plain, strict=True)
    ]
