"""What callers give, read into ids: prompts, the ends of a row, budgets, the size of the vocabulary.

A value that can mean one thing only is taken as that; one that cannot is refused by the name of its option. Knows no
decoding, and of a model only its configuration.
"""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from speculative.settings import Settings

Prompts = Sequence[Sequence[int]] | Sequence[str] | Tensor


def prompt_ids(prompts: Prompts, tokenizer: PreTrainedTokenizerBase | None, attention_mask: Tensor | None) -> list[list[int]]:
    """Token ids by row.

    Raises:
        ValueError: a row without a list around it, texts without a tokenizer or beside ids, a tensor of another shape,
            what are no ids, or a row without a token.
    """
    if isinstance(prompts, str):
        raise ValueError("prompts must be a list, if only of one text")
    if isinstance(prompts, Mapping):
        raise ValueError("prompts must be the rows themselves: give its input_ids, and its attention_mask beside them")
    if attention_mask is not None and (not isinstance(prompts, Tensor) or attention_mask.shape != prompts.shape):
        raise ValueError("attention_mask belongs to prompts that are a tensor, and has its shape")
    if isinstance(prompts, Tensor):
        rows = _unpadded(prompts, attention_mask)
    elif any(isinstance(prompt, str) for prompt in prompts):
        rows = _tokens(prompts, tokenizer)
    else:
        if not all(isinstance(prompt, Iterable) for prompt in prompts):
            raise ValueError("prompts must be a list of rows: a single one of ids is [[1, 2, 3]], not [1, 2, 3]")
        rows = [prompt.tolist() if isinstance(prompt, Tensor) else list(prompt) for prompt in prompts]
    if not rows or min(map(len, rows)) == 0:
        raise ValueError("every prompt needs at least one token")
    strange = [token for row in rows for token in row if not isinstance(token, Integral)]
    if strange:
        raise ValueError(f"prompts must hold token ids, whole numbers, not {strange[0]!r}")
    return rows


def _unpadded(prompts: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    if prompts.dim() != 2:
        raise ValueError(f"a tensor of prompts must be (B, T), not {tuple(prompts.shape)}")
    if attention_mask is None:
        return prompts.tolist()
    return [ids[kept.bool()].tolist() for ids, kept in zip(prompts, attention_mask, strict=True)]


def _tokens(prompts: Sequence[Any], tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]]:
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("prompts must be all texts, or all rows of token ids")
    if tokenizer is None:
        raise ValueError("prompts given as text need a tokenizer")
    return [tokenizer(prompt)["input_ids"] for prompt in prompts]


def end_ids(given: int | Iterable[int]) -> list[int]:
    """The ids that end a row; one alone is taken as a list of one.

    Raises:
        ValueError: what is no id.
    """
    ids = _listed(given, Integral)
    if not all(isinstance(token, Integral) for token in ids):
        raise ValueError(f"eos_token_ids must be token ids, whole numbers, not {given!r}")
    return ids


def stop_texts(given: str | Iterable[str]) -> list[str]:
    """The strings that end a row; one alone is taken as a list of one.

    Raises:
        ValueError: what is no text, or an empty one.
    """
    stops = _listed(given, str)
    if not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"stop_strings must be texts, not {given!r}")
    if "" in stops:
        raise ValueError("stop_strings: an empty string would end every row at once")
    return stops


def _listed(given: Any, single: type) -> list:
    """A list of what was given; of one thing if that is a ``single`` one, or no collection."""
    found = given.tolist() if isinstance(given, Tensor) else given
    return [found] if isinstance(found, single) or not isinstance(found, Iterable) else list(found)


def budgets(rows: Sequence[Sequence[int]], wanted: int | Iterable[int] | None, given: Settings) -> list[int]:
    """How many tokens may be written, by row.

    Raises:
        ValueError: no number, or not one for each row.
    """
    if wanted is None and given.max_new_tokens is None and given.max_length is not None:
        wanted = [max(0, given.max_length - len(row)) for row in rows]
    wanted = given.max_new_tokens if wanted is None else wanted
    if wanted is None:
        raise ValueError("max_new_tokens: say how many tokens may be written, here or in the generation_config")
    found = list(wanted) if isinstance(wanted, Iterable) else [wanted] * len(rows)
    if len(found) != len(rows) or not all(isinstance(budget, Integral) and budget >= 0 for budget in found):
        raise ValueError("max_new_tokens must be one number ≥ 0, or one for each prompt")
    return found


def known_ids(target: PreTrainedModel, given: int | None, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """How many of the target's ids can be drawn: heads are often padded beyond the tokenizer.

    Raises:
        ValueError: more than the target has, or none.
    """
    rows = target.config.vocab_size
    if given is None and tokenizer is not None and len(tokenizer) < rows:
        given = min(rows, 1 + max(tokenizer.get_vocab().values()))  # its ids may have gaps
    if given is None:
        return rows
    if not 1 <= given <= rows:
        raise ValueError(f"vocabulary_size must lie between 1 and {rows}, the rows of the target's head, not {given}")
    return given
