"""What cannot be decoded, refused by name beforehand: models and texts that do not fit, options that exclude each other."""

from collections.abc import Sequence
from numbers import Integral

import torch
from transformers import PreTrainedModel

from speculative.controls import Controls
from speculative.cost import Costs
from speculative.drafters import Draft
from speculative.length import AutoLength
from speculative.lookup import PromptLookup
from speculative.medusa import MedusaHeads
from speculative.sampling import Sampling
from speculative.tree import Tree
from speculative.typical import Typical
from speculative.verification import Rule


def check_rule(verification: str, typical: Typical | None) -> None:
    """Raise ValueError for a rule that there is not, or thresholds that belong to another."""
    if verification not in list(Rule):
        raise ValueError(f"verification must be one of {', '.join(Rule)}, not {verification!r}")
    if typical is not None and verification != Rule.TYPICAL:
        raise ValueError(f"typical: these are thresholds of the lossy rule verification='typical', not of {verification!r}")


def check_tree(
    tree: Tree,
    draft: Draft | MedusaHeads | None,
    size: int,
    num_draft_tokens: int | Costs | AutoLength | None,
    verification: str,
    lookup: PromptLookup | None,
    confidence: float,
) -> None:
    """Raise ValueError naming the option that needs a chain; the target's ids from ``size`` on are padding."""
    if draft is None:
        raise ValueError("tree: it is drafted by a model; give a draft")
    if num_draft_tokens is not None:
        raise ValueError("tree: it says how much is drafted; leave out num_draft_tokens")
    if verification not in (Rule.TOKEN, Rule.TYPICAL):
        raise ValueError(f"tree: branches are judged token by token; verification={verification!r} needs a chain")
    if lookup is not None:
        raise ValueError("tree: prompt lookup names a single continuation; leave out lookup")
    if confidence:
        raise ValueError("tree: its shape is fixed; confidence needs a chain")
    ids = draft.below(size) if isinstance(draft, MedusaHeads) else draft.size
    if tree.width > ids:
        raise ValueError(f"tree: it has {tree.width} branches at a node, the draft only {ids} output ids")


def check_heads(
    heads: MedusaHeads, target: PreTrainedModel, size: int, longest: int, lookup: PromptLookup | None, confidence: float
) -> None:
    """Raise ValueError naming what Medusa heads cannot do; the target's ids from ``size`` on are padding."""
    heads.check_fits(target)
    if heads.below(size) == 0:
        raise ValueError(f"the Medusa heads have no id below {size}, the number of the target's tokens")
    if longest > heads.count:
        raise ValueError(f"there are {heads.count} Medusa heads, they cannot draft {longest} tokens deep")
    if lookup is not None:
        raise ValueError("Medusa heads: they draft in every row; leave out lookup")
    if confidence:
        raise ValueError("Medusa heads: all heads answer at once; confidence needs a draft model")


def check_models(
    target: PreTrainedModel, draft: Draft | None, rows: Sequence[Sequence[int]], budgets: Sequence[int], size: int
) -> None:
    """Raise ValueError unless the models can continue these ``rows``, ids below ``size``, by these ``budgets``."""
    wrong = next((token for row in rows for token in (max(row), min(row)) if not 0 <= token < size), None)
    if wrong is not None:
        raise ValueError(f"a prompt has token id {wrong}, the target knows 0 … {size - 1}")
    if draft is not None:
        if draft.model.device != target.device:
            raise ValueError(f"the draft is on {draft.model.device}, the target on {target.device}; move one of them")
        draft.check_fits(size)
    longest = max(len(prompt) + budget for prompt, budget in zip(rows, budgets, strict=True))
    for name, model in (("target", target), ("draft", draft and draft.model)):
        context = model and getattr(model.config, "max_position_embeddings", None)
        if context and longest > context:
            raise ValueError(f"prompt and new tokens need {longest} positions, the {name}'s context has {context}")
        if model is not None and model.training:
            raise ValueError(f"the {name} is in training mode; call .eval() first")


def check_settings(sampling: Sampling, controls: Controls) -> None:
    """Raise ValueError for settings that are not of the whole call."""
    for name, given, kind in (("sampling", sampling, Sampling), ("controls", controls, Controls)):
        if not isinstance(given, kind):
            others = "decode rows that need others in a call of their own, with their row_keys"
            raise ValueError(f"{name} must be one speculative.{kind.__name__} for all rows; {others}")


def check_processors(controls: Controls, prompt: Sequence[int], size: int, device: torch.device) -> None:
    """Raise ValueError naming a processor with a state, tried on a ``prompt`` and ``size`` logits."""
    if controls.processors:
        logits = torch.linspace(-3.0, 3.0, size, device=device)[None]
        controls.check_pure(torch.tensor([prompt], device=device), logits)


def check_ids(eos: Sequence[int], biased: Sequence[int], size: int) -> None:
    """Raise ValueError for ids that stand for no token; an EOS id in the padding of the head is merely never drawn."""
    if min(eos, default=0) < 0:
        raise ValueError(f"eos_token_ids must be ≥ 0, not {min(eos)}")
    if max(biased, default=0) >= size:
        raise ValueError(f"logit_bias names token id {max(biased)}, the target knows 0 … {size - 1}")


def check_length(longest: int, largest: int) -> None:
    """Raise ValueError unless ``longest``, the most drafts of a round, is a whole number between 0 and ``largest``."""
    if not isinstance(longest, Integral) or not 0 <= longest <= largest:
        raise ValueError(f"num_draft_tokens must lie between 0 and {largest}, not {longest}")
