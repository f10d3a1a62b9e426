"""Typical acceptance in the engine: chains, trees, heads and lookup keep what the threshold lets through, and say "lossy".

Rounds are read from the stream: all but the last token of a round were drafted, and must pass the threshold under a fresh
forward of the text before them.
"""

import pytest
import torch

from speculative import Costs, PromptLookup, Sampling, Typical, generate, stream
from speculative.metrics import total
from speculative.sampling import probabilities
from speculative.typical import excess
from tests.speculative.laws import decode
from tests.speculative.oracles import BUDGETS, PROMPTS, WARM, cut
from tests.speculative.test_medusa import heads_of
from tests.speculative.tiny import DOUBLE, perturbed, tiny

RULE = Typical(0.2, 0.4)
LOSSY = {"verification": "typical", "typical": RULE}
WAYS = {
    "chain": ("near", {"num_draft_tokens": 3}),
    "tree": ("near", {"tree": (3, 2, 1)}),
    "trimmed tree": ("trimmed", {"tree": (2, 2)}),
    "heads": ("heads", {}),
    "tree of heads": ("heads", {"tree": (3, 2)}),
    "lookup": (None, {"lookup": PromptLookup(), "num_draft_tokens": 3}),
    "lookup else model": ("near", {"lookup": PromptLookup(), "num_draft_tokens": 3}),
    "unsure drafts stop": ("near", {"confidence": 0.3}),
    "chosen length": ("near", {"num_draft_tokens": Costs(0.01, 0.05, (1.0, 1.0, 1.0, 1.0), (0.01,) * 4)}),
}
TEXTS = [prompt * 3 for prompt in PROMPTS]


@pytest.fixture(scope="module")
def pool(target, drafts):
    return {**drafts, "heads": heads_of(target), None: None}


def laws(target, text, sampling):
    """What the target says after every prefix of ``text``."""
    with torch.inference_mode():
        return probabilities(target(torch.tensor([text])).logits[0], sampling)


@pytest.mark.parametrize("way", WAYS)
def test_every_kept_draft_passes_the_threshold_in_its_place(target, pool, way):
    name, options = WAYS[way]
    kept = 0
    texts = [list(prompt) for prompt in TEXTS]
    for piece in stream(target, pool[name], TEXTS, max_new_tokens=24, sampling=WARM, seed=3, **options, **LOSSY):
        assert piece.lossy
        text = texts[piece.row]
        drafts = piece.tokens[:-1]
        p = laws(target, text + piece.tokens, WARM)[len(text) - 1 :]
        assert all(RULE.keeps(p[place])[token] for place, token in enumerate(drafts)), (way, drafts)
        kept += len(drafts)
        text += piece.tokens
    assert kept > 10


@pytest.mark.parametrize("way", WAYS)
def test_the_result_says_lossy_where_it_is_and_only_there(target, pool, way):
    name, options = WAYS[way]
    common = {"max_new_tokens": 12, **options}
    assert generate(target, pool[name], TEXTS, sampling=WARM, **common, **LOSSY).lossy
    assert not generate(target, pool[name], TEXTS, sampling=WARM, **common).lossy
    greedy = generate(target, pool[name], TEXTS, **common, **LOSSY)
    assert not greedy.lossy
    assert greedy.tokens == generate(target, None, TEXTS, max_new_tokens=12).tokens


def test_without_drafts_nothing_is_lost(target, drafts):
    options = {"max_new_tokens": 12, "sampling": WARM, "seed": 1}
    plain = generate(target, None, PROMPTS, **options)
    for draft, more in ((None, {}), (drafts["near"], {"num_draft_tokens": 0})):
        done = generate(target, draft, PROMPTS, **options, **more, **LOSSY)
        assert not done.lossy
        assert done.tokens == plain.tokens
    assert not any(piece.lossy for piece in stream(target, drafts["near"], PROMPTS, max_new_tokens=4, sampling=WARM))


@pytest.mark.parametrize("way", ["chain", "tree", "heads", "tree of heads"])
def test_rows_budgets_and_ends_are_those_of_any_rule(target, pool, way):
    name, options = WAYS[way]
    options = options | LOSSY | {"draft": pool[name], "sampling": WARM, "seed": 5}
    free = decode(target, PROMPTS, max_new_tokens=20, **options).tokens
    done = decode(target, PROMPTS, max_new_tokens=20, eos_token_ids=[17, 33], **options)
    assert done.tokens == [cut(row, (17, 33)) for row in free]
    whole = decode(target, PROMPTS, max_new_tokens=BUDGETS, **options)
    assert [len(row) for row in whole.tokens] == BUDGETS
    for row, prompt in enumerate(PROMPTS):
        alone = decode(target, [prompt], max_new_tokens=BUDGETS[row], row_keys=[row], **options)
        assert (whole.tokens[row], whole.acceptance[row]) == (alone.tokens[0], alone.acceptance[0])


def test_lower_thresholds_keep_more(target, drafts):
    rates = [
        total(
            generate(target, drafts["other"], PROMPTS, max_new_tokens=30, sampling=Sampling(), verification="typical",
                     typical=Typical(level, level)).acceptance
        ).rate
        for level in (0.5, 0.05, 0.002)
    ]  # fmt: skip
    assert rates[0] < rates[1] < rates[2]


@pytest.mark.parametrize("shape", [{"num_draft_tokens": 3}, {"tree": (3, 2)}])
def test_texts_of_the_lossy_rule_lie_too_much_in_what_is_typical_and_those_of_exact_rules_do_not(shape):
    target = tiny(dtype=DOUBLE)
    draft, prompts = perturbed(target), PROMPTS * 8
    found = {}
    for name, rule in {"token": {"verification": "token"}, "typical": LOSSY}.items():
        done = generate(target, draft, prompts, max_new_tokens=32, sampling=Sampling(), seed=7, **shape, **rule)
        values = [
            excess(laws(target, prompt + tokens, Sampling())[len(prompt) - 1 : -1], torch.tensor(tokens), RULE)
            for prompt, tokens in zip(prompts, done.tokens, strict=True)
        ]
        found[name] = float(torch.cat(values).mean())
    # 1,536 tokens, each value in [−1, 1] and of mean 0 under an exact rule: its standard error is below 0.013.
    assert abs(found["token"]) < 0.04
    assert found["typical"] > 0.1


# What is refused


@pytest.mark.parametrize("verification", ["token", "block", "match"])
def test_thresholds_of_another_rule_are_refused(target, drafts, verification):
    with pytest.raises(ValueError, match=f"thresholds of the lossy rule verification='typical', not of '{verification}'"):
        generate(target, drafts["near"], PROMPTS, max_new_tokens=4, verification=verification, typical=RULE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lookup": PromptLookup()}, "leave out lookup"),
        ({"confidence": 0.4}, "confidence needs a chain"),
        ({"num_draft_tokens": 3}, "leave out num_draft_tokens"),
    ],
)
def test_what_a_tree_cannot_do_it_cannot_do_with_this_rule_either(target, drafts, options, message):
    with pytest.raises(ValueError, match=message):
        generate(target, drafts["near"], PROMPTS, max_new_tokens=4, tree=(2, 2), **options, **LOSSY)
