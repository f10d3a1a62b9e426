"""Drafts with another tokenizer propose what both have, and the output is the target's all the same."""

import pytest
import torch

from speculative import Sampling, generate, shared_draft
from speculative.metrics import total
from speculative.vocabulary import first_difference
from tests.speculative.texts import WORDS, byte_level
from tests.speculative.tiny import tiny

ONE = byte_level()
SIZE = len(ONE)
PROMPTS = [[60, 61, 62, 70], [100, 9]]


def test_the_first_difference_is_named():
    assert first_difference(ONE, byte_level()) is None
    other = byte_level([*WORDS[:2], "hullo", *WORDS[3:]])
    assert first_difference(ONE, other) == "id 258 is 'hello' in the target and 'hullo' in the draft"
    assert first_difference(ONE, byte_level(WORDS[:-1])) == "id 265 is 'END' in the target and None in the draft"


def test_one_tokenizer_over_matrices_padded_differently():
    target, draft = tiny(vocabulary=SIZE), tiny(vocabulary=SIZE + 30, seed=1)
    shared = shared_draft(draft, ONE, ONE, SIZE)
    assert shared.vocabulary.tolist() == list(range(SIZE))
    done = generate(target, shared, PROMPTS, max_new_tokens=12)
    assert done.tokens == generate(target, None, PROMPTS, max_new_tokens=12).tokens
    wide = generate(draft, shared_draft(target, ONE, ONE, SIZE + 30), PROMPTS, max_new_tokens=12)
    assert wide.tokens == generate(draft, None, PROMPTS, max_new_tokens=12).tokens
    same = shared_draft(target, ONE, ONE, SIZE)
    assert (same.vocabulary, same.outputs, same.inputs) == (None, None, None)


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.8)], ids=["greedy", "sampled"])
def test_another_tokenizer_keeps_the_output(sampling):
    """The draft knows other words in another order; matching makes even sampled output the plain one."""
    other = byte_level(["zz", "hello", "yy", "ld", "st"])
    target = tiny(vocabulary=SIZE)
    draft = shared_draft(tiny(vocabulary=len(other), seed=1), other, ONE, SIZE)
    assert len(draft.vocabulary) == 256 + 3
    ids = ONE.get_vocab()
    assert {ids["hello"], ids["ld"], ids["st"]} <= set(draft.vocabulary.tolist())
    assert draft.inputs[ids["hello"]] == other.get_vocab()["hello"]
    assert draft.inputs[ids["Ġworld"]] == other.get_vocab()["Ġ"]  # read as the first token of its text
    options = {"max_new_tokens": 14, "sampling": sampling, "seed": 3}
    done = generate(target, draft, PROMPTS, verification="match", **options)
    assert done.tokens == generate(target, None, PROMPTS, **options).tokens
    assert total(done.acceptance).proposed > 0


def test_a_twin_under_another_numbering_is_always_right():
    """The same model with its ids renumbered, as a draft, agrees everywhere: ids are translated both ways."""
    target = tiny(vocabulary=SIZE)
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(1))
    twin = tiny(vocabulary=SIZE)
    with torch.no_grad():
        twin.model.embed_tokens.weight.copy_(target.model.embed_tokens.weight[order])
        twin.lm_head.weight.copy_(target.lm_head.weight[order])
    entries = {i: token for token, i in ONE.get_vocab().items()}
    renumbered = byte_level()
    renumbered.get_vocab = lambda: {entries[int(old)]: new for new, old in enumerate(order)}
    draft = shared_draft(twin, renumbered, ONE, SIZE)
    done = generate(target, draft, PROMPTS, max_new_tokens=20)
    assert total(done.acceptance).rate == 1.0


def test_tokenizers_with_too_little_in_common_are_refused():
    strange = byte_level()
    strange.get_vocab = lambda: {f"<{i}>": i for i in range(SIZE)}
    with pytest.raises(ValueError, match=r"shares 0 of the target's 266 tokens.*id 0 is '!' in the target and '<0>'"):
        shared_draft(tiny(vocabulary=SIZE), strange, ONE, SIZE)
