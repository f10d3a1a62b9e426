"""Controls see the text as it would have been without drafts: blocks equal single steps, and transformers agrees."""

import math

import pytest
import torch
from scipy import stats
from transformers import (
    GenerationConfig,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from speculative import Controls, Draft, PromptLookup, Sampling, Tree, generate
from speculative.controls import History, along_paths
from speculative.tree_verification import Branches
from speculative.verification import Guess
from tests.speculative.tiny import perturbed, tiny, trimmed

PROMPTS = [[5, 9, 3, 7], [1, 2, 3, 4, 5, 6, 7, 8], [30], [11, 12, 13, 11, 12]]
KEPT = torch.tensor([*range(15), *range(15, 48, 3)])
EOS = [17, 33]


@pytest.fixture(scope="module")
def target():
    return tiny(dtype=torch.float64)


@pytest.fixture(scope="module")
def drafts(target):
    return {
        "other": Draft(tiny(seed=1, dtype=torch.float64)),
        "near": Draft(perturbed(target)),
        "trimmed": Draft(trimmed(KEPT, dtype=torch.float64), KEPT),
    }


CONTROLS = {
    "repetition": Controls(repetition_penalty=1.3),
    "presence": Controls(presence_penalty=1.5),
    "frequency": Controls(frequency_penalty=0.8),
    "shortest": Controls(min_new_tokens=9),
    "bias": Controls(logit_bias={4: 3.0, 17: -5.0}),
    "processor": Controls(processors=(NoRepeatNGramLogitsProcessor(2),)),
    "all": Controls(1.2, 0.5, 0.4, 5, {7: 1.0}, (NoRepeatNGramLogitsProcessor(2),)),
}


def history(controls, prompts, eos=()):
    return History(controls, torch.tensor(prompts), torch.tensor(list(eos), dtype=torch.long), 5)


def test_penalties_by_hand():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5, 0.0]])
    tokens = torch.tensor([[0, 1, 3, 3, 4, 4]])  # the prompt is 0 1, the text ends after 3 3, the rest is scratch
    apply = lambda controls: history(controls, [2]).apply(logits, tokens, torch.tensor([4]))[0].tolist()  # noqa: E731
    assert apply(Controls(repetition_penalty=2.0)) == [1.0, -4.0, 1.0, 0.25, 0.0]
    assert apply(Controls(presence_penalty=0.3)) == pytest.approx([2.0, -2.0, 1.0, 0.2, 0.0])
    assert apply(Controls(frequency_penalty=0.3)) == pytest.approx([2.0, -2.0, 1.0, -0.1, 0.0])
    assert apply(Controls(logit_bias={2: 1.5, 4: -math.inf})) == [2.0, -2.0, 2.5, 0.5, -math.inf]
    assert logits.tolist() == [[2.0, -2.0, 1.0, 0.5, 0.0]]


def test_eos_is_barred_until_the_shortest_length_row_by_row():
    controls = history(Controls(min_new_tokens=2), [1, 3], eos=[0, 4])
    found = controls.apply(torch.zeros(2, 5), torch.zeros(2, 6, dtype=torch.long), torch.tensor([3, 4]))
    assert found.tolist() == [[0.0] * 5, [-math.inf, 0, 0, 0, -math.inf]]


def test_the_repetition_penalty_is_transformers():
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[0, 1, 1, 4], [2, 2, 2, 2], [3, 0, 3, 0]])
    ours = history(Controls(repetition_penalty=1.7), [1, 1, 1]).apply(logits, tokens, torch.tensor([4, 4, 4]))
    torch.testing.assert_close(ours, RepetitionPenaltyLogitsProcessor(1.7)(tokens, logits.clone()))


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize("draft", ["other", "near", "trimmed"])
def test_greedy_blocks_equal_single_steps(target, drafts, name, draft):
    options = {"max_new_tokens": 18, "controls": CONTROLS[name], "eos_token_ids": EOS}
    plain = generate(target, None, PROMPTS, **options)
    fast = generate(target, drafts[draft], PROMPTS, num_draft_tokens=4, **options)
    assert fast.tokens == plain.tokens
    assert plain.tokens != generate(target, None, PROMPTS, max_new_tokens=18, eos_token_ids=EOS).tokens
    looked = generate(target, drafts[draft], PROMPTS, num_draft_tokens=3, lookup=PromptLookup(), **options)
    assert looked.tokens == plain.tokens


@pytest.mark.parametrize("name", CONTROLS)
def test_sampled_blocks_equal_single_steps_when_the_target_draws(target, drafts, name):
    options = {"max_new_tokens": 14, "controls": CONTROLS[name], "sampling": Sampling(0.8, top_k=20, min_p=0.01), "seed": 4}
    plain = generate(target, None, PROMPTS, **options)
    for draft in drafts.values():
        fast = generate(target, draft, PROMPTS, num_draft_tokens=3, verification="match", **options)
        assert fast.tokens == plain.tokens


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[3], [9, 4]]},
        {"suppress_tokens": [1, 2, 3, 40]},
        {"sequence_bias": [[[6], 4.0], [[7, 8], -3.0]]},
        {"min_new_tokens": 7, "eos_token_id": [*range(0, 48, 5)]},
    ],
)
def test_transformers_writes_the_same_under_one_configuration(target, drafts, fields):
    config = GenerationConfig(max_new_tokens=15, do_sample=False, pad_token_id=0, **fields)
    want = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        done = target.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        want.append(done[0, len(prompt) :].tolist())
    assert generate(target, None, PROMPTS, generation_config=config).tokens == want
    assert generate(target, drafts["near"], PROMPTS, generation_config=config, num_draft_tokens=4).tokens == want


SMALL = {"vocabulary": 5, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize("verification", ["token", "block"])
def test_two_sampled_tokens_follow_the_penalised_law(verification):
    """The law of the first two tokens, by transformers' own processor, against 16,000 rows."""
    model, draft, prompt, rows = tiny(**SMALL), Draft(tiny(seed=1, **SMALL)), [3, 1, 4], 16_000
    penalty = RepetitionPenaltyLogitsProcessor(3.0)

    def law_after(ids):
        ids = torch.tensor([ids])
        with torch.inference_mode():
            return penalty(ids, model(ids).logits[:, -1].clone())[0].double().softmax(-1)

    first = law_after(prompt)
    law = torch.stack([first[a] * law_after([*prompt, a]) for a in range(5)]).flatten()
    done = generate(
        model,
        draft,
        [prompt] * rows,
        max_new_tokens=3,
        num_draft_tokens=2,
        sampling=Sampling(1.0),
        controls=Controls(repetition_penalty=3.0),
        verification=verification,
    )
    seen = torch.bincount(torch.tensor([a * 5 + b for a, b, _ in done.tokens]), minlength=25)
    assert stats.chisquare(seen.numpy(), (law * rows).numpy()).pvalue > 1e-3
    few = rows // 8
    free = generate(model, draft, [prompt] * few, max_new_tokens=3, num_draft_tokens=2, sampling=Sampling(1.0))
    other = torch.bincount(torch.tensor([a * 5 + b for a, b, _ in free.tokens]), minlength=25)
    assert stats.chisquare(other.numpy(), (law * few).numpy()).pvalue < 1e-6


class Counting:
    """A processor with a memory of its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        return scores + self.calls * torch.arange(scores.shape[1])


def test_a_processor_with_a_memory_is_refused_by_name(target):
    with pytest.raises(ValueError, match="processor Counting: its answer changes from call to call"):
        generate(target, None, PROMPTS, max_new_tokens=3, controls=Controls(processors=(Counting(),)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": math.nan}, "repetition_penalty"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: math.inf}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        Controls(**fields)


def test_barring_every_token_is_an_error_and_not_a_text(target):
    everything = Controls(logit_bias=dict.fromkeys(range(48), -math.inf))
    for sampling in (Sampling(0.0), Sampling(1.0)):
        with pytest.raises(ValueError, match="every token is excluded"):
            generate(target, None, PROMPTS, max_new_tokens=3, controls=everything, sampling=sampling)


def test_a_draft_whose_tokens_are_all_barred_is_corrected(target, drafts):
    barred = Controls(logit_bias=dict.fromkeys(KEPT.tolist(), -math.inf))
    options = {"max_new_tokens": 10, "controls": barred}
    done = generate(target, drafts["trimmed"], PROMPTS, num_draft_tokens=3, **options)
    assert done.tokens == generate(target, None, PROMPTS, **options).tokens
    assert not {token for row in done.tokens for token in row} & set(KEPT.tolist())


@pytest.mark.parametrize("guess", ["chain", "tree"])
def test_logits_of_a_block_equal_those_of_single_steps_at_every_place(guess):
    """Each place of a block, controlled within it, against the same place as the end of a text of its own."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, (3, 12), generator=generator)
    lengths, prompts = torch.tensor([4, 6, 5]), [2, 3, 5]
    drafted = torch.randint(5, (3, 3), generator=generator)
    block = Guess(drafted, None) if guess == "chain" else Branches(Tree((0, 0, 2)), drafted)
    paths = [[], [0], [0, 1], [0, 1, 2]] if guess == "chain" else [[], [0], [1], [1, 2]]
    logits = torch.randn(3, 4, 5, generator=generator)
    controls = Controls(1.3, 0.5, 0.4, 2, {1: 1.0}, (NoRepeatNGramLogitsProcessor(2),))
    alive = torch.tensor([True, True, False])
    found = along_paths(history(controls, prompts, [0]), logits, tokens.clone(), lengths, drafted, block.paths, alive)
    seen = 0
    for row in range(3):
        for place, path in enumerate(paths):
            text = torch.cat([tokens[row, : lengths[row]], drafted[row, path]])[None]
            alone = history(controls, prompts[row : row + 1], [0])
            want = alone.apply(logits[row : row + 1, place], text, torch.tensor([text.shape[1]]))
            live = alive[row] and reachable(found[row], drafted[row], path, paths)
            assert torch.equal(found[row, place], want[0] if live else logits[row, place]), (row, place)
            seen += live
    assert 4 < seen < 8


def reachable(found, drafted, path, paths):
    """Whether every draft of a path is allowed where it stands, and none ends the row; 0 is the EOS id."""
    places = [paths.index(path[:n]) for n in range(len(path))]
    allowed = [found[place, drafted[column]] > -math.inf for place, column in zip(places, path, strict=True)]
    return all(allowed) and 0 not in drafted[path].tolist()
