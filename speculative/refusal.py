"""What trees and Medusa heads cannot be combined with, refused by name before anything is decoded."""

from transformers import PreTrainedModel

from speculative.cost import Costs
from speculative.drafters import Draft
from speculative.lookup import PromptLookup
from speculative.medusa import MedusaHeads
from speculative.tree import Tree
from speculative.verification import Rule


def check_tree(
    tree: Tree,
    draft: Draft | MedusaHeads | None,
    num_draft_tokens: int | Costs | None,
    verification: str,
    lookup: PromptLookup | None,
    confidence: float,
) -> None:
    """Raise ValueError naming the option that needs a chain."""
    if draft is None:
        raise ValueError("tree: it is drafted by a model; give a draft")
    if num_draft_tokens is not None:
        raise ValueError("tree: it says how much is drafted; leave out num_draft_tokens")
    if verification != Rule.TOKEN:
        raise ValueError(f"tree: branches are judged token by token; verification={verification!r} needs a chain")
    if lookup is not None:
        raise ValueError("tree: prompt lookup names a single continuation; leave out lookup")
    if confidence:
        raise ValueError("tree: its shape is fixed; confidence needs a chain")
    if tree.width > draft.size:
        raise ValueError(f"tree: it has {tree.width} branches at a node, the draft only {draft.size} output ids")


def check_heads(
    heads: MedusaHeads, target: PreTrainedModel, longest: int, lookup: PromptLookup | None, confidence: float
) -> None:
    """Raise ValueError naming what Medusa heads cannot do."""
    heads.check_fits(target)
    if longest > heads.count:
        raise ValueError(f"there are {heads.count} Medusa heads, they cannot draft {longest} tokens deep")
    if lookup is not None:
        raise ValueError("Medusa heads: they draft in every row; leave out lookup")
    if confidence:
        raise ValueError("Medusa heads: all heads answer at once; confidence needs a draft model")
