"""A draft with a trimmed head, rewritten as a stock model over the target's whole vocabulary.

Other engines want one logit for each id. Stock heads have no bias, so the rows of excluded ids are set to −s·u, where
u is the direction on which every final hidden state projects most evenly (least squares: H·u ≈ 1). Excluded logits then
lie below the kept ones' log-sum-exp by a wide margin, which is measured here and not assumed.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipeline.head_fit import ridge
from speculative import Draft

MARGIN = 40.0  # nats between the excluded logits and the kept ones' log-sum-exp, on the weakest of the positions seen


@dataclass(frozen=True)
class Expansion:
    """``excluded_mass``: the largest share of probability on excluded ids at any position seen (0 if none is excluded)."""

    model: PreTrainedModel
    excluded_mass: float


@torch.no_grad()  # not inference mode: its tensors could not be used outside it
def expand(draft: Draft, texts: Iterable[list[int]]) -> Expansion:
    """A float32 model with ``vocab_size`` head rows; ``texts`` are token ids on which the margin is set and measured."""
    if draft.vocabulary is None:
        return Expansion(draft.model.float(), 0.0)
    source = draft.model.float()
    hidden = torch.cat([source.base_model(input_ids=torch.tensor([t]), use_cache=False).last_hidden_state[0] for t in texts])
    head = source.get_output_embeddings().weight
    log_sum = (hidden @ head.T).logsumexp(-1)
    direction = _even_direction(hidden)
    projection = hidden @ direction
    usable = projection > 0.1
    scale = float(((MARGIN - log_sum) / projection)[usable].max().clamp(min=MARGIN)) if usable.any() else 0.0
    rows = (-scale * direction).repeat(source.config.vocab_size, 1)
    rows[draft.vocabulary] = head
    model = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32)
    state = dict(source.state_dict())
    name = next(n for n, m in model.named_modules() if m is model.get_output_embeddings())
    model.load_state_dict(state | {f"{name}.weight": rows})
    excluded = source.config.vocab_size - len(draft.vocabulary)
    log_excluded = -scale * projection + torch.log(torch.tensor(float(excluded)))
    mass = torch.sigmoid(log_excluded - log_sum).max()
    return Expansion(model.eval(), float(mass))


def _even_direction(hidden: Tensor) -> Tensor:
    """The u (width,) that minimises |H u − 1|² with a little ridge, H (positions, width)."""
    wide = hidden.double()
    return ridge(wide.T @ wide, wide.sum(0), 1e-4).float()
