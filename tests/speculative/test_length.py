"""The draft length follows costs and acceptance: none for a draft that is never right, the longest for one that always is."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative import Costs, Draft, Sampling, generate
from speculative import length as length_module
from speculative.drafters import ModelDrafter
from speculative.length import FIRST_TRIAL, LAST_TRIAL, MAY_LOSE, SHARE, AutoLength
from tests.speculative.laws import chi_square, decode
from tests.speculative.tiny import perturbed, tiny

CHEAP = Costs(0.01, 0.05, (0.9, 0.95, 1.0, 1.05, 1.1), (0.1, 0.1, 0.1, 0.1, 0.1))
DEAR = Costs(0.01, 0.9, (0.9, 1.4, 1.9, 2.4, 2.9), (0.1, 0.1, 0.1, 0.1, 0.1))
PROMPTS = [[5, 9, 3, 7], [1, 2, 3, 4, 5, 6, 7, 8], [30]]


def play(length, rounds, acceptance, seed=0):
    """The lengths chosen over ``rounds`` rounds of one row whose drafts stay with the given chance."""
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for _ in range(rounds):
        count = length.choose()
        chosen.append(count)
        stays = torch.rand(count, generator=generator) < acceptance
        accepted = int(stays.long().cumprod(0).sum())
        length.observe(count, count, accepted)
    return chosen


def test_the_choice_has_the_highest_expected_rate():
    """At acceptance a, K drafts give (1 − a^(K+1)) / (1 − a) tokens; here by brute force over K."""
    for acceptance in (0.1, 0.3, 0.5, 0.7, 0.9):
        length = AutoLength(CHEAP, acceptance)
        rates = [sum(acceptance**j for j in range(k + 1)) / (1.0 if k == 0 else CHEAP.round(k)) for k in range(5)]
        assert length.choose() == max(range(5), key=rates.__getitem__)


def test_a_draft_that_is_always_right_is_used_to_the_full():
    assert set(play(AutoLength(CHEAP), 60, 1.0)[5:]) == {4}


def test_a_draft_that_is_never_right_is_given_up_and_tried_ever_more_rarely():
    chosen = play(AutoLength(CHEAP), 3000, 0.0)
    tries = [place for place, count in enumerate(chosen) if count]
    assert max(chosen[50:]) == 1
    gaps = [b - a for a, b in itertools.pairwise(tries[5:])]
    assert gaps == sorted(gaps)
    assert max(gaps) == LAST_TRIAL + 1
    assert len(tries) < 30


def test_trials_find_a_draft_that_became_good():
    length = AutoLength(CHEAP)
    assert play(length, 200, 0.0)[-1] == 0
    assert 4 in play(length, 2500, 0.95)[-200:]


def test_a_dear_draft_is_not_used_however_good():
    chosen = play(AutoLength(DEAR), 400, 0.9)
    assert sum(map(bool, chosen)) < 400 / FIRST_TRIAL


def test_a_round_without_proposals_teaches_nothing():
    length = AutoLength(CHEAP)
    before = (list(length.kept), list(length.tried))
    length.observe(4, 0, 0)
    assert (length.kept, length.tried) == before


def test_a_place_counts_once_the_drafts_before_it_stayed():
    length = AutoLength(CHEAP)
    kept, tried = list(length.kept), list(length.tried)
    length.observe(3, 3, 1)
    assert length.tried == pytest.approx([0.98 * tried[0] + 1, 0.98 * tried[1] + 1, tried[2], tried[3]])
    assert length.kept == pytest.approx([0.98 * kept[0] + 1, 0.98 * kept[1], kept[2], kept[3]])


@pytest.mark.parametrize("costs", [CHEAP, DEAR], ids=["cheap", "dear"])
@pytest.mark.parametrize("seed", [None, 1], ids=["near", "other"])
def test_greedy_output_is_plain_whatever_is_chosen(costs, seed):
    """K changes from round to round and is 0 in many: the draft's cache must stay right all the same."""
    target = tiny(dtype=torch.float64)
    draft = Draft(perturbed(target) if seed is None else tiny(seed=seed, dtype=torch.float64))
    done = generate(target, draft, PROMPTS, max_new_tokens=60, num_draft_tokens=costs)
    assert done.tokens == decode(target, PROMPTS, max_new_tokens=60).tokens


def test_a_confident_draft_drafts_on_and_an_unsure_one_stops():
    target = tiny(dtype=torch.float64)
    draft = Draft(perturbed(target))
    options = {"max_new_tokens": 30, "num_draft_tokens": 4}
    plain = decode(target, PROMPTS, max_new_tokens=30).tokens
    proposed = []
    for confidence in (0.0, 0.3, 1.0):
        done = generate(target, draft, PROMPTS, confidence=confidence, **options)
        assert done.tokens == plain
        proposed.append(sum(part.proposed for part in done.acceptance))
    assert proposed[0] > proposed[1] > proposed[2] == 0


def test_confidence_leaves_the_law_as_it_is(small):
    model, drafts = small
    for verification in ("token", "block"):
        p_value, _ = chi_square(model, drafts["other"], Sampling(1.0), count=3, confidence=0.45, verification=verification)
        assert p_value > 1e-3


@settings(deadline=None, max_examples=60)
@given(
    st.floats(0.01, 0.8),
    st.floats(0.0, 0.5),
    st.integers(1, 6),
    st.lists(st.integers(0, 6), min_size=1, max_size=80),
    st.floats(0.0, 0.1),
)
def test_no_draft_puts_a_text_further_behind_than_is_allowed(draft, step, longest, luck, read):
    """Whatever is accepted, and however misleading it was before: the bound holds after every round."""
    verify = tuple(0.9 + step * n for n in range(longest + 1))
    costs = Costs(0.01, draft, verify, (0.1,) * (longest + 1), draft_reading=read)
    length, written, spent, behind = AutoLength(costs, expected=0.9), 0, 0.0, 0
    for kept in [*[longest] * 5, *luck, *[0] * 40]:
        count = length.choose()
        accepted = min(kept, count)
        length.observe(count, count, accepted)
        spent += costs.round(count) + read * behind if count else 1.0
        written, behind = written + 1 + accepted, 0 if count else behind + 1
        assert spent <= written + MAY_LOSE + SHARE * written + 1e-9


def test_without_the_bound_a_useless_draft_would_cost_more(monkeypatch):
    costs = Costs(0.01, 0.3, (0.9, 1.0, 1.1, 1.2, 1.3), (0.1,) * 5)

    def loss():
        chosen = play(AutoLength(costs, expected=0.95), 48, 0.0)
        return sum(costs.round(count) - 1 for count in chosen if count)

    assert loss() <= MAY_LOSE + 48 * SHARE
    monkeypatch.setattr(length_module, "MAY_LOSE", 100.0)
    assert loss() > MAY_LOSE + 48 * SHARE


def test_what_the_draft_must_read_again_is_paid():
    """After sixteen rounds without it: 1.1 − 1 for a round of one draft, and 16 · 0.5 or 16 · 0.05 for what it missed."""
    for read, chosen in ((0.5, 0), (0.05, 1), (0.0, 1)):
        length = AutoLength(replace(CHEAP, draft_reading=read), expected=0.0)
        for _ in range(FIRST_TRIAL):
            assert length.choose() == 0
            length.observe(0, 0, 0)
        assert length.choose() == chosen
        length.observe(chosen, chosen, 0)
        assert length.saved == pytest.approx(-(0.1 + 16 * read) * chosen)


def test_an_unsure_draft_is_paid_for_all_the_same():
    length = AutoLength(CHEAP)
    length.observe(4, 0, 0)
    assert length.saved == pytest.approx(1 - CHEAP.round(4))


def test_what_was_learnt_in_one_call_counts_in_the_next():
    """Told to expect nothing, it tries a draft after sixteen rounds; the next call drafts from its first round on."""
    target = tiny(dtype=torch.float64)
    learning = AutoLength(CHEAP, expected=0.0)
    plain = decode(target, PROMPTS, max_new_tokens=40).tokens
    proposed = []
    for _ in range(2):
        done = generate(target, Draft(target), PROMPTS, max_new_tokens=40, num_draft_tokens=learning)
        assert done.tokens == plain
        proposed.append(sum(part.proposed for part in done.acceptance))
    assert proposed[1] > 1.5 * proposed[0] > 0


def test_a_draft_that_is_never_asked_does_not_read_the_prompts(monkeypatch):
    target = tiny(dtype=torch.float64)
    dear = Costs(0.01, 3.0, (0.9, 1.9), (0.1, 0.1))
    monkeypatch.setattr(ModelDrafter, "prefill", lambda *_: pytest.fail("it read"))
    done = generate(target, Draft(target), PROMPTS, max_new_tokens=10, num_draft_tokens=dear)
    assert done.draft_forwards == 0
    assert done.tokens == decode(target, PROMPTS, max_new_tokens=10).tokens
