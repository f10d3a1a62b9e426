"""A processor may allow no token after a text that is not allowed, or has ended: drafts that lead there harm no legal text."""

from itertools import pairwise

import pytest
import torch

from speculative import Controls, Draft, PromptLookup, Sampling, generate
from speculative.metrics import total
from tests.speculative.laws import decode
from tests.speculative.oracles import EIGHT, WARM
from tests.speculative.test_medusa import heads_of
from tests.speculative.tiny import DOUBLE, KEPT, tiny

EOS = [17, 33]
PROMPTS = [[5, 9, 5, 3, 5], [1, 2, 3, 1, 4, 1], [30, 7, 30], [8, 2, 8], [40]]
NOTHING = -torch.inf


def no_pair_twice(ids, scores):
    """Bars what would repeat a pair of tokens; after a text that repeats one, or has ended, nothing is allowed."""
    text = ids[0].tolist()
    pairs = list(pairwise(text))
    if len(set(pairs)) < len(pairs) or text[-1] in EOS:
        return torch.full_like(scores, NOTHING)
    barred = [b for a, b in pairs if a == text[-1]]
    scores[0, barred] = NOTHING
    return scores


def nothing_kept(ids, scores):
    """Bars all ids that the trimmed draft has; after a text with one of them nothing is allowed."""
    if set(ids[0].tolist()) & set(KEPT):
        return torch.full_like(scores, NOTHING)
    scores[0, KEPT] = NOTHING
    return scores


def alone(target, prompts, **options):
    """What plain decoding writes, row by row."""
    rows = [decode(target, [prompt], row_keys=[row], **options) for row, prompt in enumerate(prompts)]
    return [done.tokens[0] for done in rows]


@pytest.mark.parametrize("sampling", [Sampling(0.0), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("plain", {"lookup": PromptLookup()}),
        ("near", {"lookup": PromptLookup()}),
        ("near", {}),
        ("other", {}),
        ("trimmed", {}),
        ("heads", {}),
    ],
)
def test_drafts_of_every_kind_leave_a_legal_text_alone(target, drafts, name, how, sampling):
    draft = heads_of(target) if name == "heads" else drafts.get(name)
    options = {"max_new_tokens": 16, "controls": Controls(processors=[no_pair_twice]), "eos_token_ids": EOS}
    options |= {"sampling": sampling, "seed": 3}
    done = decode(target, PROMPTS, draft=draft, num_draft_tokens=3, verification="match", **how, **options)
    assert done.tokens == alone(target, PROMPTS, **options)
    assert total(done.acceptance).proposed > 0


@pytest.mark.parametrize("name", ["near", "other", "trimmed", "heads"])
def test_trees_do_too(target, drafts, name):
    draft = heads_of(target) if name == "heads" else drafts[name]
    options = {"max_new_tokens": 16, "controls": Controls(processors=[no_pair_twice]), "eos_token_ids": EOS}
    done = generate(target, draft, PROMPTS, tree=(3, 2, 1), **options)
    assert done.tokens == alone(target, PROMPTS, **options)


@pytest.mark.parametrize("verification", ["token", "block"])
def test_drafts_that_are_barred_are_refused_and_not_forgotten(target, drafts, verification):
    """At temperature 1: the texts stay legal; that the law is right as well is enumerated elsewhere."""
    options = {"max_new_tokens": 16, "controls": Controls(processors=[no_pair_twice]), "eos_token_ids": EOS}
    for draft, lookup in ((drafts["near"], None), (None, PromptLookup()), (heads_of(target), None)):
        done = generate(target, draft, PROMPTS, sampling=Sampling(), verification=verification, lookup=lookup, **options)
        for prompt, tokens in zip(PROMPTS, done.tokens, strict=True):
            pairs = list(pairwise(prompt + tokens))
            assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize("how", [{"num_draft_tokens": 3}, {"tree": (2, 2)}], ids=["chain", "tree"])
def test_a_draft_whose_ids_are_all_barred(target, drafts, how):
    prompts = [[16, 17, 19], [20, 22], [23]]
    options = {"max_new_tokens": 10, "controls": Controls(processors=[nothing_kept])}
    done = generate(target, drafts["trimmed"], prompts, **how, **options)
    assert done.tokens == alone(target, prompts, **options)
    assert total(done.acceptance).accepted == 0 < total(done.acceptance).proposed


@pytest.mark.parametrize("count", [0, 3])
def test_rows_that_have_ended_are_not_asked(target, count):
    """A row of eight ends at once and stays in the batch; its text allows nothing more."""
    first = generate(target, None, EIGHT, max_new_tokens=1).tokens
    ends = next(row for row in first if row[0] not in {prompt[-1] for prompt in EIGHT})

    def until_the_end(ids, scores):
        return torch.full_like(scores, NOTHING) if ids[0, -1] in ends else scores

    assert 0 < sum(row == ends for row in first) <= 2  # so few that they stay
    options = {"max_new_tokens": 8, "controls": Controls(processors=[until_the_end]), "eos_token_ids": ends}
    done = generate(target, Draft(target) if count else None, EIGHT, num_draft_tokens=count, **options)
    assert done.tokens == alone(target, EIGHT, **options)


def test_a_text_that_allows_nothing_is_an_error_all_the_same():
    target = tiny(dtype=DOUBLE)
    for draft in (None, target):
        with pytest.raises(ValueError, match="every token is excluded"):
            generate(target, draft, [[5, 9, 5, 9]], max_new_tokens=3, controls=Controls(processors=[no_pair_twice]))
