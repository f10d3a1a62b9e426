"""Speculative decoding writes what plain decoding writes, token for token when greedy; rows do not see their neighbours."""

import pytest

from speculative import Draft, Sampling, engine, generate
from speculative.cache import CachedModel
from speculative.metrics import total
from tests.speculative.laws import decode
from tests.speculative.oracles import BUDGETS, FAMILIES, PROMPTS, WARM, transformers_greedy
from tests.speculative.tiny import perturbed, tiny

# Greedy: the same tokens


@pytest.mark.parametrize("kind", [*FAMILIES, "smollm3"])
def test_greedy_equals_plain_and_transformers(kind):
    target = tiny(kind)
    want = [transformers_greedy(target, prompt, 16) for prompt in PROMPTS]
    assert len({token for row in want for token in row}) > 5
    assert generate(target, None, PROMPTS, max_new_tokens=16).tokens == want
    pool = {"other": tiny(kind, seed=1), "near": perturbed(target, 0.02), "same": target}
    for name, model in pool.items():
        rates = []
        for drafts in range(1, 9):
            done = generate(target, Draft(model), PROMPTS, max_new_tokens=16, num_draft_tokens=drafts)
            assert done.tokens == want, (name, drafts)
            rates.append(total(done.acceptance).rate)
        assert {"other": max(rates) < 0.5, "near": 0.1 < min(rates) < 1, "same": min(rates) == 1}[name], (name, rates)


@pytest.mark.parametrize("count", [1, 2, 4, 6])
@pytest.mark.parametrize("name", ["trimmed", "gpt2"])
def test_greedy_with_a_trimmed_or_foreign_draft(target, drafts, name, count):
    done = generate(target, drafts[name], PROMPTS, max_new_tokens=20, num_draft_tokens=count)
    assert done.tokens == generate(target, None, PROMPTS, max_new_tokens=20).tokens
    assert total(done.acceptance).proposed > 0


def test_a_trimmed_draft_is_right_where_the_choice_is_in_its_vocabulary(target, drafts):
    done = generate(target, drafts["trimmed"], PROMPTS, max_new_tokens=20, num_draft_tokens=3)
    assert 0.1 < total(done.acceptance).rate < 1


# Rows do not see their neighbours


@pytest.mark.parametrize("sampling", [Sampling(0.0), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budgets", [[20] * 6, BUDGETS], ids=["even", "ragged"])
@pytest.mark.parametrize("name", ["plain", "other", "near", "same", "trimmed"])
def test_a_batch_equals_its_rows_alone(target, drafts, name, budgets, sampling):
    options = {"draft": drafts.get(name), "num_draft_tokens": 4, "sampling": sampling, "seed": 5}
    options["eos_token_ids"] = [17, 33]
    whole = decode(target, PROMPTS, max_new_tokens=budgets, **options)
    for row, prompt in enumerate(PROMPTS):
        alone = decode(target, [prompt], max_new_tokens=budgets[row], row_keys=[row], **options)
        assert whole.tokens[row] == alone.tokens[0], row
        assert whole.stopped[row] == alone.stopped[0], row


def test_rows_of_one_prompt_differ_by_their_keys_alone(target, drafts):
    options = {"max_new_tokens": 15, "draft": drafts["near"], "num_draft_tokens": 3, "sampling": WARM}
    keys = [7, 3, 99, 3]
    done = decode(target, [PROMPTS[0]] * 4, row_keys=keys, **options).tokens
    assert done[1] == done[3]
    assert len({tuple(row) for row in done}) == 3
    mixed = [PROMPTS[1], PROMPTS[0], PROMPTS[0], PROMPTS[2]]
    assert decode(target, mixed, row_keys=[1, 99, 7, 3], **options).tokens[1:3] == [done[2], done[0]]


def test_rows_that_leave_early_do_not_disturb_the_others(target, drafts, monkeypatch):
    options = {"draft": drafts["near"], "num_draft_tokens": 3, "sampling": WARM}
    selected = []
    real = CachedModel.feed
    monkeypatch.setattr(CachedModel, "feed", lambda self, t, *a, **k: selected.append(len(t)) or real(self, t, *a, **k))
    done = decode(target, PROMPTS, max_new_tokens=[2, 30, 2, 2, 9, 30], **options).tokens
    assert {2, 6} <= set(selected)  # the batch did shrink
    monkeypatch.setattr(engine, "COMPACT_BELOW", 0.0)
    assert decode(target, PROMPTS, max_new_tokens=[2, 30, 2, 2, 9, 30], **options).tokens == done


# Cases at the edge


def test_eager_attention_writes_the_same_text():
    target, eager = tiny(), tiny(implementation="eager")
    assert generate(eager, None, PROMPTS, max_new_tokens=12).tokens == generate(target, None, PROMPTS, max_new_tokens=12).tokens


def test_a_row_without_budget_and_a_prompt_of_one_token(target, drafts):
    options = {"max_new_tokens": [0, 12, 12, 12], "draft": drafts["same"], "num_draft_tokens": 3}
    done = decode(target, [[1], *PROMPTS[:3]], **options)
    assert done.tokens == [[], *generate(target, None, PROMPTS[:3], max_new_tokens=12).tokens]


def test_a_row_at_the_end_of_its_context_beside_one_at_its_start():
    model = tiny("gpt2", n_positions=32)
    prompts, budgets = [list(range(31)), [1]], [1, 20]
    done = generate(model, Draft(model), prompts, max_new_tokens=budgets, num_draft_tokens=4)
    assert done.tokens == [transformers_greedy(model, *pair) for pair in zip(prompts, budgets, strict=True)]


@pytest.mark.parametrize("sampling", [Sampling(0.0), WARM], ids=["greedy", "sampled"])
def test_counts_of_a_row_do_not_depend_on_its_neighbours(target, drafts, sampling):
    options = {"draft": drafts["same"], "num_draft_tokens": 6, "sampling": sampling, "seed": 5}
    whole = decode(target, PROMPTS, max_new_tokens=BUDGETS, **options)
    for row, prompt in enumerate(PROMPTS):
        alone = decode(target, [prompt], max_new_tokens=BUDGETS[row], row_keys=[row], **options)
        assert whole.acceptance[row] == alone.acceptance[0], row
