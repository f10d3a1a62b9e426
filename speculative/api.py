"""The front door: one call decodes, with a draft or without, at once or as a stream.

It turns what callers have (texts, tensors, a GenerationConfig) into the engine's ids and options, and refuses what
cannot be decoded exactly before the first token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from speculative import inputs, settings
from speculative.controls import Controls, History
from speculative.cost import Costs
from speculative.drafters import Draft, Drafter, ModelDrafter
from speculative.engine import Decoding, Generation, Options
from speculative.inputs import Prompts
from speculative.length import AutoLength
from speculative.lookup import LookupElseModel, PromptLookup
from speculative.medusa import MedusaDrafter, MedusaHeads
from speculative.refusal import (
    check_heads,
    check_ids,
    check_length,
    check_models,
    check_processors,
    check_rule,
    check_settings,
    check_tree,
)
from speculative.rows import Finish, Rows
from speculative.sampling import Sampling
from speculative.text import Transcript
from speculative.tree import Tree
from speculative.tree_drafter import TreeDrafter
from speculative.typical import Typical
from speculative.verification import Rule

DRAFT_TOKENS = 3  # unless given
LONGEST_DRAFT = 128  # far beyond what pays: the chance that a draft is reached falls with every one before it
AnyDraft = Draft | PreTrainedModel | MedusaHeads | None


@dataclass(frozen=True)
class Piece:
    """What one round added to one row: committed ids, the text that is now certain, and why the row ended, or None.

    ``lossy`` as in ``speculative.Generation``.
    """

    row: int
    tokens: list[int]
    text: str
    finish: Finish | None
    lossy: bool = False


def generate(target: PreTrainedModel, draft: AnyDraft, prompts: Prompts, **options: Any) -> Generation:
    """Continue every prompt; the law of the output is the target's, whatever drafts, unless a lossy rule is asked for.

    Args:
        target: a decoder-only model in eval mode.
        draft: the proposer, a model or the target's Medusa heads; None decodes plainly, or by prompt lookup alone if
            ``lookup`` is given.
        prompts: token ids by row, of any lengths; a tensor (B, T), with ``attention_mask`` if it is padded; or texts,
            with ``tokenizer``.
        options: those of ``stream``.

    Raises:
        ValueError: what cannot be decoded, by name.
    """
    decoding, transcript = prepare(target, draft, prompts, **options)
    while decoding.alive:
        decoding.advance()
    done = decoding.result()
    if transcript is None:
        return done
    return replace(done, text=[transcript.take(row, last=True) for row in range(len(done.tokens))])


def stream(target: PreTrainedModel, draft: AnyDraft, prompts: Prompts, **options: Any) -> Iterator[Piece]:
    """The same, round by round: what is yielded is committed and never taken back.

    The prompts are read before this returns. Closing the iterator ends the work.

    Options, for both:
        max_new_tokens: one budget, or one for each row.
        generation_config: transformers' settings; what is given beside it counts more.
        num_draft_tokens: K, the tokens drafted each round (3, or all Medusa heads, unless given); or the ``Costs`` of this
            machine, by which K is then chosen every round from the acceptance so far; or an ``AutoLength`` of them, which
            goes on learning from call to call.
        tree: instead of a chain of K, the branches at every depth, (3, 2, 1); or a ``Tree``.
        sampling: temperature and filters, of all rows; greedy decoding by default.
        controls: penalties, biases and processors, of all rows.
        verification: "token", "block" or "match", which are exact, or "typical", which is lossy (see ``speculative.Rule``).
        typical: thresholds of verification="typical"; ``Typical()`` unless given.
        lookup: prompt lookup, before the draft model or without one.
        confidence: stop drafting once the draft's best token has less probability than this.
        eos_token_ids: an id, or ids, that end a row; the id itself is kept.
        stop_strings: a text, or texts, that end a row, with ``tokenizer``; the token that completes one is kept, the text
            ends before. A special token is one of them by itself, not as a part.
        tokenizer: gives ``text`` in the result.
        vocabulary_size: ids from here on, rows that pad the heads of both models, are never drawn; the tokenizer's unless
            given, or else all of the target's.
        seed, row_keys: the random numbers of a row depend on these two alone; keys default to the row's place.
        log_probs: keep the target's log-probability of every new token.
        states: keep the hidden state that the target's head read for every new token.
        attention_mask: (B, T) of ``prompts``, when they are a padded tensor.
    """
    return _pieces(*prepare(target, draft, prompts, **options))


def _pieces(decoding: Decoding, transcript: Transcript | None) -> Iterator[Piece]:
    while decoding.alive:
        for row, ids, finish in decoding.advance():
            text = "" if transcript is None else transcript.take(row, finish is not None)
            yield Piece(row, ids, text, finish, decoding.options.lossy)


def prepare(
    target: PreTrainedModel,
    draft: AnyDraft,
    prompts: Prompts,
    *,
    max_new_tokens: int | Sequence[int] | None = None,
    generation_config: GenerationConfig | None = None,
    num_draft_tokens: int | Costs | AutoLength | None = None,
    tree: Sequence[int] | Tree | None = None,
    sampling: Sampling | None = None,
    controls: Controls | None = None,
    verification: str = "token",
    typical: Typical | None = None,
    lookup: PromptLookup | None = None,
    confidence: float = 0.0,
    eos_token_ids: int | Sequence[int] | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    vocabulary_size: int | None = None,
    seed: int = 0,
    row_keys: Sequence[int] | None = None,
    log_probs: bool = False,
    states: bool = False,
    attention_mask: Tensor | None = None,
) -> tuple[Decoding, Transcript | None]:
    """A decoding that has read its prompts and written nothing, and the text of its rows; options are those of ``stream``."""
    rows = inputs.prompt_ids(prompts, tokenizer, attention_mask)
    given = settings.read(generation_config or GenerationConfig())
    budgets = inputs.budgets(rows, max_new_tokens, given)
    sampling, controls = sampling or given.sampling, controls or given.controls
    check_settings(sampling, controls)
    stops = inputs.stop_texts(given.stop_strings if stop_strings is None else stop_strings)
    eos = torch.tensor(inputs.end_ids(given.eos_token_ids if eos_token_ids is None else eos_token_ids), dtype=torch.long)
    if stops and tokenizer is None:
        raise ValueError("stop_strings need a tokenizer")
    check_rule(verification, typical)
    if not 0.0 <= confidence <= 1.0:
        raise ValueError(f"confidence must lie in [0, 1], not {confidence}")
    keys = range(len(rows)) if row_keys is None else row_keys
    if len(keys) != len(rows):
        raise ValueError(f"row_keys needs one key for each of the {len(rows)} prompts, not {len(keys)}")
    size = inputs.known_ids(target, vocabulary_size, tokenizer)
    check_ids(eos.tolist(), list(controls.logit_bias), size)
    padded = vocabulary_size is not None or tokenizer is not None
    draft = _placed(draft, size if padded else None)
    if tree is not None:
        tree = tree if isinstance(tree, Tree) else Tree.of(tree)
        check_tree(tree, draft, size, num_draft_tokens, verification, lookup, confidence)
        num_draft_tokens = tree.depth
    length, longest = _length(draft, num_draft_tokens, drafts=draft is not None or lookup is not None)
    check_models(target, draft if isinstance(draft, Draft) else None, rows, budgets, size)
    if isinstance(draft, MedusaHeads):
        check_heads(draft, target, size, longest, lookup, confidence)
    with torch.inference_mode():
        check_processors(controls, rows[0], size, target.device)
        # Drafts beyond a row's end are written and never kept.
        room = 1 + (min(longest, max(budgets)) if tree is None else tree.size)
        capacity = max(len(prompt) + budget for prompt, budget in zip(rows, budgets, strict=True)) + room
        live = Rows(rows, budgets, capacity, keys, target.device)
        eos = eos.to(target.device)
        history = History(controls, live.prompts, eos[eos < size], size) if controls.active else None
        drafter = None
        if longest > 0:
            shape = (len(live.index), capacity)
            drafter = _drafter(draft, lookup, tree, shape, sampling, seed, history, confidence, size)
        transcript = None if tokenizer is None else Transcript(tokenizer, len(rows), stops)
        judge = (Rule(verification), typical or Typical())
        options = Options(sampling, *judge, length, longest, tree, size, eos, seed, transcript, log_probs, states)
        return Decoding(target, live, drafter, history, options), transcript


def _placed(draft: AnyDraft, size: int | None) -> Draft | MedusaHeads | None:
    """A model as a draft, without what it has beyond the first ``size`` target ids, its tables on its model's device."""
    draft = Draft(draft) if isinstance(draft, PreTrainedModel) else draft
    if not isinstance(draft, Draft):
        return draft
    return (draft if size is None else draft.cut(size)).placed()


def _length(
    draft: Draft | MedusaHeads | None, given: int | Costs | AutoLength | None, drafts: bool
) -> tuple[int | AutoLength, int]:
    """How many tokens to draft, and the most of them: none unless something ``drafts``."""
    if given is None:
        given = draft.count if isinstance(draft, MedusaHeads) else DRAFT_TOKENS
    auto = AutoLength(given) if isinstance(given, Costs) else given
    longest = auto.costs.longest if isinstance(auto, AutoLength) else auto
    check_length(longest, LONGEST_DRAFT)
    longest = longest if drafts else 0
    return (auto if isinstance(auto, AutoLength) else longest), longest


def _drafter(
    draft: Draft | MedusaHeads | None,
    lookup: PromptLookup | None,
    tree: Tree | None,
    shape: tuple[int, int],
    sampling: Sampling,
    seed: int,
    history: History | None,
    confidence: float,
    size: int,
) -> Drafter | TreeDrafter | MedusaDrafter:
    """Who drafts, for a batch of ``shape``: rows and slots."""
    if draft is None:
        return lookup
    if isinstance(draft, MedusaHeads):
        return MedusaDrafter(draft, sampling, seed, tree, size)
    model = ModelDrafter(draft, *shape, sampling, seed, history, confidence)
    if tree is not None:
        return TreeDrafter(model, tree)
    return model if lookup is None else LookupElseModel(lookup, model)
