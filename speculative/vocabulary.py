"""Are two tokenizers one? If not, which of their tokens are the same text.

Equal sizes prove nothing; every id must stand for the same string, or the draft proposes other text than it means. A
draft with another tokenizer proposes the tokens that both have (Timor et al., 2502.05202), which stays exact, for q is
whatever it really draws from.
"""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from speculative.drafters import Draft

FEWEST_SHARED = 0.05  # of the target's tokens; below, a draft could hardly ever be right


def first_difference(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> str | None:
    """What differs first, by id, or None when both are one."""
    ours, theirs = ({i: token for token, i in tokenizer.get_vocab().items()} for tokenizer in (target, draft))
    for i in range(max(*ours, *theirs) + 1):
        if ours.get(i) != theirs.get(i):
            return f"id {i} is {ours.get(i)!r} in the target and {theirs.get(i)!r} in the draft"
    return None


def shared_draft(
    model: PreTrainedModel,
    draft_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
    target_size: int,
) -> Draft:
    """A draft for a target with ``target_size`` logits, over the ids that mean the same text in both tokenizers.

    Raises:
        ValueError: too few of them; the first id that differs is named.
    """
    difference = first_difference(target_tokenizer, draft_tokenizer)
    rows = model.get_output_embeddings().weight.shape[0]
    if difference is None:  # one tokenizer; matrices may still be padded differently
        if rows == target_size:
            return Draft(model)
        own = torch.arange(min(len(draft_tokenizer), rows, target_size))
        return Draft(model, own, own, torch.arange(target_size).clamp(max=rows - 1))
    theirs = {_plain(token): i for token, i in draft_tokenizer.get_vocab().items() if i < rows}
    ours = {_plain(token): i for token, i in target_tokenizer.get_vocab().items() if i < target_size}
    pairs = sorted((i, theirs[token]) for token, i in ours.items() if token in theirs)
    if len(pairs) < FEWEST_SHARED * len(ours):
        raise ValueError(
            f"the draft's tokenizer shares {len(pairs)} of the target's {len(ours)} tokens, too few to be of use ({difference})"
        )
    vocabulary, outputs = (torch.tensor(ids) for ids in zip(*pairs, strict=True))
    return Draft(model, vocabulary, outputs, _inputs(dict(pairs), draft_tokenizer, target_tokenizer, target_size))


def _inputs(known: dict[int, int], draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, size: int) -> torch.Tensor:
    """The draft id under which each target id is read: the same text, else the first token of that text."""
    filler = next((i for i in (draft.unk_token_id, draft.eos_token_id) if i is not None), 0)
    read = torch.full((size,), filler)
    for i in range(min(size, len(target))):
        if i in known:
            read[i] = known[i]
        elif ids := draft.encode(target.decode([i]), add_special_tokens=False):
            read[i] = ids[0]
    return read


def _plain(token: str) -> str:
    """A token's text with the two usual signs for a space made one."""
    return token.replace("Ġ", " ").replace("▁", " ")
