"""Rows that pad a head beyond the tokenizer are never drawn: the text is that of a model without them."""

import copy

import pytest
import torch

from speculative import Controls, Draft, MedusaHeads, PromptLookup, Sampling, generate
from speculative.metrics import total
from tests.speculative.oracles import PROMPTS, WARM
from tests.speculative.texts import byte_level
from tests.speculative.tiny import DOUBLE, perturbed, tiny

SIZE, ROWS = 48, 64


def padded(seed=0, rows=ROWS, size=SIZE):
    """A model whose rows behind ``size`` would be chosen often."""
    model = tiny(vocabulary=rows, seed=seed, dtype=DOUBLE)
    with torch.no_grad():
        model.lm_head.weight[size:] *= 4
    return model


def without_padding(model):
    twin = copy.deepcopy(model)
    twin.lm_head = torch.nn.Linear(model.config.hidden_size, SIZE, bias=False, dtype=DOUBLE)
    with torch.no_grad():
        twin.lm_head.weight.copy_(model.lm_head.weight[:SIZE])
    twin.config.vocab_size = SIZE
    return twin


@pytest.fixture(scope="module")
def target():
    return padded()


def test_uncut_the_padding_is_chosen(target):
    done = generate(target, None, PROMPTS, max_new_tokens=12)
    assert any(token >= SIZE for row in done.tokens for token in row)


@pytest.mark.parametrize("how", [{"num_draft_tokens": 3}, {"tree": (3, 2)}, {"num_draft_tokens": 3, "lookup": PromptLookup()}])
@pytest.mark.parametrize("sampling", [Sampling(0.0), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["near", "other"])
def test_the_text_is_that_of_models_without_padding(target, kind, sampling, how):
    draft = perturbed(target) if kind == "near" else padded(seed=1)
    options = {"max_new_tokens": 14, "sampling": sampling, "seed": 3, "log_probs": True, **how}
    done = generate(target, draft, PROMPTS, vocabulary_size=SIZE, **options)
    want = generate(without_padding(target), without_padding(draft), PROMPTS, **options)
    assert done.tokens == want.tokens
    assert done.acceptance == want.acceptance
    for ours, theirs in zip(done.log_probs, want.log_probs, strict=True):
        assert ours == pytest.approx(theirs)


@pytest.mark.parametrize("sampling", [Sampling(0.0), WARM], ids=["greedy", "sampled"])
def test_a_trimmed_draft_loses_the_padding_of_its_vocabulary(target, sampling):
    kept = torch.tensor([*range(0, SIZE, 2), *range(SIZE, ROWS)])
    model = padded(seed=1)
    head = torch.nn.Linear(model.config.hidden_size, len(kept), bias=False, dtype=DOUBLE)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight[kept])
    model.lm_head = head
    options = {"max_new_tokens": 14, "sampling": sampling, "vocabulary_size": SIZE, "seed": 3}
    done = generate(target, Draft(model, kept), PROMPTS, verification="match", **options)
    assert done.tokens == generate(target, None, PROMPTS, **options).tokens
    assert Draft(model, kept).cut(SIZE).vocabulary.tolist() == list(range(0, SIZE, 2))
    assert Draft(model, kept).cut(ROWS).size == len(kept)


@pytest.mark.parametrize("how", [{}, {"tree": (2, 1)}], ids=["chain", "tree"])
def test_heads_lose_it_too(target, how):
    heads = MedusaHeads(2, target.config.hidden_size, ROWS).to(DOUBLE)
    with torch.no_grad():
        heads.matrix.weight.copy_(target.lm_head.weight)
    options = {"max_new_tokens": 14, "vocabulary_size": SIZE}
    done = generate(target, heads.eval(), PROMPTS, **options, **how)
    assert done.tokens == generate(target, None, PROMPTS, **options).tokens
    assert total(done.acceptance).proposed > 0


def test_the_tokenizer_says_where_the_padding_begins():
    tokenizer = byte_level()
    target = padded(rows=len(tokenizer) + 40, size=len(tokenizer))
    prompts = [[60, 61, 62], [100, 9]]
    plain = generate(target, None, prompts, max_new_tokens=20)
    assert any(token >= len(tokenizer) for row in plain.tokens for token in row)
    for draft in (None, padded(seed=1, rows=len(tokenizer) + 8, size=len(tokenizer))):
        done = generate(target, draft, prompts, max_new_tokens=20, tokenizer=tokenizer)
        assert all(token < len(tokenizer) for row in done.tokens for token in row)
        assert done.tokens == generate(target, None, prompts, max_new_tokens=20, vocabulary_size=len(tokenizer)).tokens


def test_an_eos_in_the_padding_ends_nothing_and_harms_nothing(target):
    options = {"max_new_tokens": 6, "vocabulary_size": SIZE, "eos_token_ids": [50], "controls": Controls(min_new_tokens=3)}
    done = generate(target, None, PROMPTS, **options)
    assert done.tokens == generate(target, None, PROMPTS, max_new_tokens=6, vocabulary_size=SIZE).tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary_size": 0}, "vocabulary_size must lie between 1 and 64, the rows of the target's head, not 0"),
        ({"vocabulary_size": 65}, "not 65"),
        ({"vocabulary_size": 7}, "a prompt has token id 9, the target knows 0 … 6"),
        ({"vocabulary_size": 48, "controls": Controls(logit_bias={50: 1.0})}, "logit_bias names token id 50"),
        ({"eos_token_ids": [-1]}, "eos_token_ids must be ≥ 0, not -1"),
    ],
)
def test_ids_that_do_not_exist_are_refused(target, options, message):
    with pytest.raises(ValueError, match=message):
        generate(target, None, [[5, 9, 3]], **{"max_new_tokens": 3} | options)


def test_a_draft_of_nothing_but_padding_is_refused(target):
    kept = torch.arange(SIZE, ROWS)
    with pytest.raises(ValueError, match="the draft's vocabulary has no id below 48"):
        Draft(target, kept, outputs=kept).cut(SIZE)
