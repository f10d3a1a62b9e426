"""Sampled text has the target's law: chi-square against the exact law of two tokens, and faults that it must see.

Token for token where the rule allows it: matching writes what plain sampling writes.
"""

from dataclasses import replace

import pytest
import torch

from speculative import Sampling, engine, generate
from speculative.sampling import draw
from speculative.verification import Verdict, verify_sampled
from tests.speculative.laws import chi_square
from tests.speculative.oracles import PROMPTS, WARM

SETTINGS = {
    "T 1": Sampling(temperature=1.0),
    "T 0.5": Sampling(temperature=0.5),
    "T 2": Sampling(temperature=2.0),
    "top-k": Sampling(temperature=1.5, top_k=3),
    "top-p": Sampling(temperature=1.5, top_p=0.8),
    "min-p": Sampling(temperature=1.5, min_p=0.3),
    "typical": Sampling(temperature=1.5, typical_p=0.7),
}


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("plain", "T 1"),
        *(("other", setting) for setting in SETTINGS),
        ("near", "T 1"),
        ("same", "T 1"),
        ("trimmed", "T 1"),
        ("trimmed", "top-p"),
    ],
)
def test_sampled_tokens_follow_the_target_s_law(small, name, setting):
    model, drafts = small
    p_value, rate = chi_square(model, drafts[name], SETTINGS[setting])
    assert p_value > 1e-3
    if name in ("other", "near", "trimmed"):
        assert 0.1 < rate < 0.97


@pytest.mark.parametrize("verification", ["block", "match"])
@pytest.mark.parametrize("name", ["other", "near", "same", "trimmed"])
def test_the_other_rules_have_the_law_too(small, name, verification):
    model, drafts = small
    assert chi_square(model, drafts[name], SETTINGS["T 1"], count=3, verification=verification)[0] > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["token", "block", "match"])
@pytest.mark.parametrize("setting", ["T 1", "top-p"])
def test_sixty_thousand_rows_follow_the_target_s_law(small, setting, verification):
    model, drafts = small
    p_value, _ = chi_square(model, drafts["other"], SETTINGS[setting], rows=60_000, count=3, verification=verification)
    assert p_value > 1e-3


def test_matching_writes_what_plain_sampling_writes(target, drafts):
    options = {"max_new_tokens": 20, "sampling": WARM, "seed": 8, "eos_token_ids": [17, 33]}
    plain = generate(target, None, PROMPTS, **options).tokens
    for draft in drafts.values():
        assert generate(target, draft, PROMPTS, num_draft_tokens=4, verification="match", **options).tokens == plain


def test_blocks_keep_more_drafts_than_tokens(small):
    model, drafts = small
    rates = {
        rule: chi_square(model, drafts["other"], SETTINGS["T 1"], count=3, new_tokens=4, verification=rule)[1]
        for rule in ("match", "token", "block")
    }
    assert rates["match"] < rates["token"] < rates["block"]


def no_residual(p, guess, accept, follow, limits, rule):
    verdict = verify_sampled(p, guess, accept, follow, limits, rule)
    row = torch.arange(len(p))
    return Verdict(verdict.accepted, draw(p[row, verdict.accepted], follow[row, verdict.accepted]))


def one_uniform_for_both(p, guess, accept, follow, limits, rule):
    return verify_sampled(p, guess, accept, torch.cat([accept, follow[:, -1:]], 1), limits, rule)


def tempered_draft(p, guess, accept, follow, limits, rule):
    flat = guess.q.sqrt() / guess.q.sqrt().sum(-1, keepdim=True)
    return verify_sampled(p, replace(guess, q=flat), accept, follow, limits, rule)


def q_of_another_row(p, guess, accept, follow, limits, rule):
    return verify_sampled(p, replace(guess, q=guess.q.roll(1, 0)), accept, follow, limits, rule)


def bonus_of_another_row(p, guess, accept, follow, limits, rule):
    moved = torch.cat([p[:, :-1], p[:, -1:].roll(1, 0)], 1)
    return verify_sampled(moved, guess, accept, follow, limits, rule)


def tempered_target(p, guess, accept, follow, limits, rule):
    return verify_sampled(p.sqrt() / p.sqrt().sum(-1, keepdim=True), guess, accept, follow, limits, rule)


def one_place_late(p, guess, accept, follow, limits, rule):
    return verify_sampled(p, replace(guess, q=guess.q.roll(1, 1)), accept, follow, limits, rule)


FAULTS = [
    no_residual,
    one_uniform_for_both,
    tempered_draft,
    tempered_target,
    q_of_another_row,
    bonus_of_another_row,
    one_place_late,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_chi_square_sees_a_planted_fault(small, fault, monkeypatch):
    model, drafts = small

    def verify(p, guess, *rest):
        return (fault if guess.depth else verify_sampled)(p, guess, *rest)

    monkeypatch.setattr(engine, "verify_sampled", verify)
    count = 1 if fault is bonus_of_another_row else 2  # the bonus must be one of the two tokens that are counted
    p_value, _ = chi_square(model, drafts["other"], SETTINGS["T 1"], rows=20_000, count=count)
    assert p_value < 1e-6


def test_sampling_does_not_touch_the_global_generator(target, drafts):
    before = torch.get_rng_state()
    generate(target, drafts["near"], PROMPTS, max_new_tokens=9, num_draft_tokens=3, sampling=WARM)
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_give_different_texts_and_one_seed_the_same(target, drafts):
    def texts(seed):
        return generate(target, drafts["near"], PROMPTS, max_new_tokens=12, num_draft_tokens=3, sampling=WARM, seed=seed).tokens

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)
