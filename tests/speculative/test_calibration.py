"""Costs from a clock that only the models move: what is measured is exactly what each forward was made to take."""

from types import SimpleNamespace

import pytest

from speculative import Costs, Draft, MedusaHeads, Sampling, Tree, engine
from speculative.cache import CachedModel
from speculative.calibration import measure, measure_trees
from speculative.medusa import MedusaDrafter
from tests.speculative.tiny import tiny

PROMPTS = [[5, 9, 3, 7], [1, 2, 3, 4, 5, 6, 7], [30, 8]]
STEP, READ = 0.25, 0.01  # of the draft, in plain steps


def verifying(nodes):
    """Plain steps of a target forward over so many tokens."""
    return 1.0 + 0.125 * (nodes - 1)


@pytest.fixture
def pair(monkeypatch):
    """Target and draft, random, so that almost no draft stays."""
    target, draft, clock = tiny(), Draft(tiny(seed=1)), SimpleNamespace(now=0.0)
    feed, feed_nodes, prefill = CachedModel.feed, CachedModel.feed_nodes, CachedModel.prefill

    def fed(self, tokens, *args, **options):
        clock.now += STEP if self.model is draft.model else verifying(tokens.shape[1])
        return feed(self, tokens, *args, **options)

    def fed_nodes(self, tokens, *args):
        clock.now += STEP * tokens.shape[1] if self.model is draft.model else verifying(tokens.shape[1])
        return feed_nodes(self, tokens, *args)

    def prefilled(self, tokens, lengths):
        clock.now += READ * int(lengths.sum()) if self.model is draft.model else 7.0
        return prefill(self, tokens, lengths)

    monkeypatch.setattr(CachedModel, "feed", fed)
    monkeypatch.setattr(CachedModel, "feed_nodes", fed_nodes)
    monkeypatch.setattr(CachedModel, "prefill", prefilled)
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return SimpleNamespace(target=target, draft=draft, clock=clock)


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling()], ids=["greedy", "sampled"])
def test_costs_are_those_of_rounds_with_all_their_drafts(pair, sampling):
    *_, found = measure(pair.target, pair.draft, PROMPTS, sampling, 4, new_tokens=12)
    assert found.plain_seconds == pytest.approx(1.0)
    assert found.draft == pytest.approx(STEP)
    assert found.verify == pytest.approx([verifying(n) for n in range(1, 6)])
    assert found.other == pytest.approx([0.0] * 5)
    assert (found.heads, found.draft_reading) == (0.0, pytest.approx(READ))


def test_costs_are_right_where_every_draft_stays(pair):
    """Few rounds are left then; those that the budget cuts would weigh most."""
    same = SimpleNamespace(draft=Draft(pair.target))
    *_, found = measure(pair.target, same.draft, PROMPTS, Sampling(0.0), 4, new_tokens=6)
    # Both models are one here: a draft step and a token of the target are both a whole forward.
    assert found.draft == pytest.approx(1 + 0.125 * (1 / 2 + 1 / 3) / 2)  # median over K of K steps, the first of two tokens
    assert found.verify == pytest.approx([verifying(n) for n in range(1, 6)])


def test_heads_are_paid_in_every_round_but_the_first(pair, monkeypatch):
    heads, propose = MedusaHeads(3, 32, 48).eval(), MedusaDrafter.propose

    def proposed(self, *args):
        pair.clock.now += 0.5 * (self.states is not None)
        return propose(self, *args)

    monkeypatch.setattr(MedusaDrafter, "propose", proposed)
    *_, found = measure(pair.target, heads, PROMPTS, Sampling(0.0), 3, new_tokens=8)
    assert (found.draft, found.draft_reading) == (0.0, 0.0)
    assert found.heads == pytest.approx(0.5)
    assert found.verify == pytest.approx([verifying(n) for n in range(1, 5)])


def test_trees_are_those_of_whole_rounds_too(pair):
    *_, found = measure_trees(pair.target, pair.draft, PROMPTS, Sampling(0.0), (1, 3), new_tokens=8)
    # (w, 1): a step for the first level, w nodes fed for the second; 2w nodes verified.
    assert found.draft == (pytest.approx((1, STEP)), pytest.approx((3, 3 * STEP)))
    assert found.verify == (pytest.approx((0, 1.0)), pytest.approx((2, verifying(3))), pytest.approx((6, verifying(7))))
    assert found.round(Tree.of((3, 1))) == pytest.approx(4 * STEP + verifying(7))


def test_rows_that_pad_the_head_are_not_drawn_while_trees_are_timed():
    """Without the size of the vocabulary a draft that lacks the padding would be refused."""
    target, draft = tiny(vocabulary=64), Draft(tiny(seed=1), None)
    steps = list(measure_trees(target, draft, [[1, 2, 3]] * 2, Sampling(), (1, 2), new_tokens=4, vocabulary_size=48))
    assert len(steps) == 1
    with pytest.raises(ValueError, match="the draft has 48 output ids, the target 64"):
        list(measure_trees(target, draft, [[1, 2, 3]] * 2, Sampling(), (1, 2), new_tokens=4))


def test_costs_without_a_reading_cost_are_those_of_before():
    stored = {"plain_seconds": 1.0, "draft": 0.1, "verify": [0.9, 1.0], "other": [0.1, 0.1], "heads": 0.0}
    assert Costs.stored(stored).draft_reading == 0.0
    assert Costs.stored(stored).verify == (0.9, 1.0)
