"""The speedup that measured costs and a known acceptance predict is the one that is measured.

Forwards of the tiny models are made to last some milliseconds, so that a busy machine does not decide, and drafts stay by a
coin of known bias: what is tested is the way from the clock through ``calibration`` and ``cost`` to a ratio.
"""

import time
from dataclasses import asdict

import pytest
import torch

from speculative import Draft, Sampling, engine, generate
from speculative.cache import CachedModel
from speculative.calibration import _costs, measure
from speculative.cost import expected_ratio
from speculative.metrics import Phases
from speculative.verification import Verdict
from tests.speculative.tiny import tiny

PROMPTS = [[5, 9, 3, 7] * 12, [1, 2, 3, 4, 5] * 8, [30, 8] * 20, [11, 12, 13] * 12]
TOKENS, LONGEST = 60, 3


@pytest.mark.parametrize(("heads", "draft"), [(False, (0.05, 0.0)), (True, (0.0, 0.1))])
def test_costs_of_timings_by_hand(heads, draft):
    """A plain step of 0.8 + 0.2 s; two drafts of 0.05 s, or all heads in 0.1 s; 0.4 s to read a token, 0.15 more by both."""
    rounds = [[(0.0, 0.8, 0.2)], [(0.1 if heads else 0.05, 0.9, 0.2)], [(0.1, 1.0, 0.3)]]
    found = _costs(rounds, ([0.5, 0.3, 0.4], [0.6, 0.5]), heads)
    assert (found.draft, found.heads) == pytest.approx(draft)
    assert found.plain_seconds == 1.0
    assert (found.verify, found.other) == ((0.8, 0.9, 1.0), (0.2, 0.2, 0.3))
    assert (found.reading, found.draft_reading) == pytest.approx((0.4, 0.15))
    assert _costs(rounds, ([0.5], [0.4]), heads).draft_reading == 0, "noise is no gain"


def timed(target, draft, count: int) -> list[Phases]:
    """Each prompt, decoded at K = ``count``."""
    done = (generate(target, draft, [p], max_new_tokens=TOKENS, num_draft_tokens=count) for p in PROMPTS)
    return [one.seconds for one in done]


@pytest.mark.slow
@pytest.mark.parametrize("bias", [0.3, 0.6, 0.9])
def test_measured_speed_is_as_predicted(monkeypatch, bias):
    target, draft = tiny(), Draft(tiny(seed=1))
    coin = torch.Generator().manual_seed(0)
    feed, prefill = CachedModel.feed, CachedModel.prefill

    def slow(cached, tokens, positions, keep):
        logits = feed(cached, tokens, positions, keep)
        time.sleep(0.004 if cached.model is draft.model else 0.02 + 0.001 * tokens.shape[1])
        return logits

    def slow_reading(cached, tokens, lengths):
        time.sleep(float(lengths.max() + 1) * (0.002 if cached.model is draft.model else 0.01))
        prefill(cached, tokens, lengths)

    def tossed(choices, drafted, limits):
        stays = torch.rand(drafted.shape, generator=coin) < bias
        accepted = torch.minimum(stays.long().cumprod(-1).sum(-1), limits)
        return Verdict(accepted, choices.gather(1, accepted[:, None]).squeeze(1))

    monkeypatch.setattr(CachedModel, "feed", slow)
    monkeypatch.setattr(CachedModel, "prefill", slow_reading)
    monkeypatch.setattr(engine, "verify_choices", tossed)
    *_, costs = measure(target, draft, PROMPTS, Sampling(0.0), LONGEST, new_tokens=24)
    for drafts in (1, LONGEST):
        plain, fast = (timed(target, draft, count) for count in (0, drafts))
        predicted = expected_ratio([bias] * TOKENS, costs, drafts)
        decoding = [sum(seconds.decoding for seconds in each) for each in (plain, fast)]
        assert decoding[0] / decoding[1] == pytest.approx(predicted, rel=0.1), drafts
        whole = [sum(sum(asdict(seconds).values()) for seconds in each) for each in (plain, fast)]
        prompt = sum(map(len, PROMPTS)) // len(PROMPTS)
        predicted = expected_ratio([bias] * TOKENS, costs, drafts, prompt=prompt)
        assert whole[0] / whole[1] == pytest.approx(predicted, rel=0.1), drafts
