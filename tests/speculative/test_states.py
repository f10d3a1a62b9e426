"""The states that decoding keeps are those of one plain forward over the finished text."""

import pytest
import torch

from speculative import Sampling, generate

PROMPTS = [[1, 5, 9], [3, 2, 7, 7, 4, 11, 6], [8]]
BUDGETS = [14, 3, 9]


@pytest.mark.parametrize("how", [{"num_draft_tokens": 0}, {"num_draft_tokens": 3}, {"tree": (3, 2, 1)}])
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0)])
@pytest.mark.parametrize("name", ["near", "other", "trimmed"])
def test_states_equal_those_of_one_forward(target, drafts, name, sampling, how):
    options = {"max_new_tokens": BUDGETS, "eos_token_ids": [17, 33], "sampling": sampling, "seed": 4}
    done = generate(target, drafts[name], PROMPTS, states=True, **options, **how)
    for prompt, tokens, states in zip(PROMPTS, done.tokens, done.states, strict=True):
        with torch.inference_mode():
            whole = target.base_model(torch.tensor([prompt + tokens])).last_hidden_state[0]
        assert len(states) == len(tokens) > 0
        torch.testing.assert_close(states, whole[len(prompt) - 1 : -1], rtol=0, atol=1e-9)


def test_states_are_kept_only_when_asked_for(target):
    assert generate(target, None, PROMPTS, max_new_tokens=2).states is None


def test_a_row_that_writes_nothing_has_no_states(target):
    done = generate(target, None, PROMPTS[:2], max_new_tokens=[0, 2], states=True)
    assert [len(states) for states in done.states] == [0, 2]
    assert [len(states) for states in generate(target, None, PROMPTS[:1], max_new_tokens=0, states=True).states] == [0]
