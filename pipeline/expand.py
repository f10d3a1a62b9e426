"""A draft with a trimmed head, rewritten as a stock model over the target's whole vocabulary.

Other engines want one logit for each id. Stock heads have no bias, so the rows of excluded ids are set to −s·u, where
u is the direction on which every final hidden state projects most evenly (least squares: H·u ≈ 1). Excluded logits then
lie below the kept ones' log-sum-exp by a wide margin, which is measured here and not assumed. No margin holds for every
state there could be (some vector of any norm has h·u < 0), so the bound is one on held-out states. Families pad their
matrices differently over one tokenizer, so the number of rows is the target's, not the draft's.
"""

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipeline.head_fit import ridge
from pipeline.low_rank import multiplied_out
from speculative import Draft

MARGIN = 40.0  # nats between the excluded logits and the kept ones' log-sum-exp, on the weakest of the positions seen


@dataclass(frozen=True)
class Expansion:
    """``excluded_mass``: the largest share of probability on excluded ids at any position seen (0 if none is excluded).

    The rows of the ``excluded`` ids are −``scale`` · ``direction`` (width,); None where no id is.
    """

    model: PreTrainedModel
    excluded_mass: float
    direction: Tensor | None = None
    scale: float = 0.0
    excluded: int = 0


@dataclass(frozen=True)
class Bound:
    """No state that projects as far as the least of ``positions`` states did, and whose kept log-sum-exp is as high as the
    least of theirs, has more than ``mass`` on excluded ids."""

    mass: float
    positions: int


@torch.no_grad()  # not inference mode: its tensors could not be used outside it
def expand(draft: Draft, texts: Iterable[list[int]], rows: int | None = None) -> Expansion:
    """A float32 model with ``rows`` rows of head and embedding (None: as many as the draft's own embedding has).

    ``texts`` are token ids on which the margin is set and measured.
    """
    source = multiplied_out(draft.model).float()
    if draft.vocabulary is None:
        return Expansion(source, 0.0)
    hidden, log_sum = (torch.cat(each) for each in zip(*_states(source, texts), strict=True))
    direction = _even_direction(hidden)
    projection = hidden @ direction
    usable = projection > 0.1
    scale = float(((MARGIN - log_sum) / projection)[usable].max().clamp(min=MARGIN)) if usable.any() else 0.0
    count = rows or source.config.vocab_size
    wide = (-scale * direction).repeat(count, 1)
    wide[draft.vocabulary] = source.get_output_embeddings().weight
    config = copy.deepcopy(source.config)
    config.vocab_size = count
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    lookup = _name(model, model.get_input_embeddings())
    state = dict(source.state_dict())
    state[lookup] = _resized(state[lookup], count)
    model.load_state_dict(state | {_name(model, model.get_output_embeddings()): wide})
    excluded = count - len(draft.vocabulary)
    mass = float(_excluded_mass(excluded, scale, projection, log_sum).max())
    return Expansion(model.eval(), mass, direction, scale, excluded)


@torch.no_grad()
def held_out_bound(expansion: Expansion, draft: Draft, texts: Iterable[list[int]]) -> Bound:
    """How much can lie on excluded ids, by the states of ``texts`` on which no margin was set.

    A share falls in both the projection and the kept log-sum-exp, so the least of each, taken together, bound it.
    """
    found = list(_states(draft.model, texts))
    positions = sum(len(state) for state, _ in found)
    if expansion.direction is None:
        return Bound(0.0, positions)
    projection = min((float((state @ expansion.direction).min()) for state, _ in found), default=math.inf)
    log_sum = min((float(sums.min()) for _, sums in found), default=math.inf)
    mass = _excluded_mass(expansion.excluded, expansion.scale, torch.tensor(projection), torch.tensor(log_sum))
    return Bound(float(mass), positions)


def _excluded_mass(excluded: int, scale: float, projection: Tensor, log_sum: Tensor) -> Tensor:
    """n·exp(−s·h·u) ÷ (n·exp(−s·h·u) + exp(log_sum)), by position."""
    return torch.sigmoid(math.log(max(excluded, 1)) - scale * projection - log_sum)


def _states(model: PreTrainedModel, texts: Iterable[list[int]]) -> Iterator[tuple[Tensor, Tensor]]:
    """By text: its final hidden states (positions, width), and the log-sum-exp of the logits at each.

    The logits of one text at a time are held: those of all texts would fill gigabytes.
    """
    head = model.get_output_embeddings().weight
    for text in texts:
        state = model.base_model(input_ids=torch.tensor([text]), use_cache=False).last_hidden_state[0]
        yield state, (state @ head.T).logsumexp(-1)


def _name(model: PreTrainedModel, module: nn.Module) -> str:
    """The name of a module's weight in the state dict."""
    return next(f"{name}.weight" for name, found in model.named_modules() if found is module)


def _resized(lookup: Tensor, rows: int) -> Tensor:
    """The embedding cut to ``rows``, or padded with zeros for ids that no text holds."""
    padded = lookup.new_zeros(rows, lookup.shape[1])
    padded[: len(lookup)] = lookup[:rows]
    return padded


def _even_direction(hidden: Tensor) -> Tensor:
    """The u (width,) that minimises |H u − 1|² with a little ridge, H (positions, width)."""
    wide = hidden.double()
    return ridge(wide.T @ wide, wide.sum(0), 1e-4).float()
