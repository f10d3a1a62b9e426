"""A row's text depends on its prompt, its budget, its key and the seed; not on its neighbours, nor on how many there are."""

import pytest

from speculative import AutoLength, Controls, Costs, PromptLookup, Sampling, generate
from speculative.metrics import total
from tests.speculative.laws import decode
from tests.speculative.oracles import EIGHT, WARM

COSTS = Costs(0.01, 0.1, (0.9, 0.95, 1.0, 1.05, 1.1), (0.1,) * 5)
BUDGETS = [24, 3, 20, 1, 24, 11, 16, 24]
WAYS = {
    "fixed": {"num_draft_tokens": 4},
    "chosen": {"num_draft_tokens": COSTS},
    "chosen, unsure": {"num_draft_tokens": COSTS, "confidence": 0.3},
    "lookup": {"num_draft_tokens": 4, "lookup": PromptLookup(2)},
    "lookup, unsure": {"num_draft_tokens": 4, "lookup": PromptLookup(2), "confidence": 0.5},
    "lookup, chosen": {"num_draft_tokens": COSTS, "lookup": PromptLookup(2)},
    "tree": {"tree": (2, 2)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["other", "near"])
def test_a_batch_of_eight_equals_eight_rows_alone(target, drafts, name, way):
    options = {"draft": drafts[name], "sampling": WARM, "seed": 5, "eos_token_ids": [17, 33], **WAYS[way]}
    whole = decode(target, EIGHT, max_new_tokens=BUDGETS, **options)
    for row, prompt in enumerate(EIGHT):
        alone = decode(target, [prompt], max_new_tokens=BUDGETS[row], row_keys=[row], **options)
        assert (whole.tokens[row], whole.finish[row]) == (alone.tokens[0], alone.finish[0]), row
        assert whole.acceptance[row] == alone.acceptance[0], row


def test_lengths_differ_from_row_to_row(target, drafts, monkeypatch):
    """What the test above is for: within a round some rows have drafts and others none."""
    seen, real = [], AutoLength.observe
    monkeypatch.setattr(AutoLength, "observe", lambda self, *counts: seen.append((id(self), *counts)) or real(self, *counts))
    done = generate(target, drafts["near"], EIGHT, max_new_tokens=24, sampling=WARM, **WAYS["chosen"])
    assert len({row for row, *_ in seen}) == 8
    assert len({asked for _, asked, *_ in seen}) > 2
    assert total(done.acceptance).accepted > 0


def test_a_seed_gives_one_text_where_the_length_is_chosen_afresh(target, drafts):
    options = {"max_new_tokens": 24, "sampling": WARM, "seed": 3}
    afresh = [generate(target, drafts["near"], EIGHT, num_draft_tokens=length, **options).tokens for length in (COSTS, COSTS)]
    assert (
        afresh[0] == afresh[1] == generate(target, drafts["near"], EIGHT, num_draft_tokens=AutoLength(COSTS), **options).tokens
    )
    learning = AutoLength(COSTS)
    first, second = (generate(target, drafts["near"], EIGHT, num_draft_tokens=learning, **options).tokens for _ in range(2))
    assert first == afresh[0] != second  # it has learnt; only the law is the same


@pytest.mark.parametrize("name", ["sampling", "controls"])
def test_settings_of_one_row_are_refused_with_the_way_out(target, name):
    one = {"sampling": Sampling(), "controls": Controls()}[name]
    for given in ([one] * 8, (one,)):
        with pytest.raises(
            ValueError, match=f"{name} must be one .* for all rows; .* in a call of their own, with their row_keys"
        ):
            generate(target, None, EIGHT, max_new_tokens=3, **{name: given})


def test_rows_with_other_settings_in_a_call_of_their_own_write_what_they_would_together(target, drafts):
    options = {"max_new_tokens": 12, "num_draft_tokens": 3, "seed": 2}
    warm, hot = (generate(target, drafts["near"], EIGHT, sampling=s, **options).tokens for s in (WARM, Sampling(1.5)))
    keys = range(4, 8)
    half = generate(target, drafts["near"], EIGHT[4:], sampling=Sampling(1.5), row_keys=keys, **options).tokens
    assert half == hot[4:] != warm[4:]
