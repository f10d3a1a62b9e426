"""What is timed is spread over all that is there: answers lie longest prompt first, and nothing may take the first few."""

from itertools import repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.responses import Request, Response, batches, write_shard
from pipeline import calibrate, contestants, plan, trees
from pipeline.choices import Stage
from pipeline.config import Decoding
from pipeline.errors import PipelineError
from pipeline.held_out import HeldOut
from pipeline.spread import spread
from speculative import Draft, Sampling
from speculative.cost import Costs
from tests.pipeline.exported import finished
from tests.speculative.tiny import tiny

GREEDY = Sampling(0.0)
COSTS = Costs(0.02, 0.25, (0.9, 1.0), (0.1, 0.25))
LENGTHS = range(24, 0, -1)  # of prompts, as they lie in the shards


def answers(split: str = "validation", tokens: int = 16) -> list[Response]:
    requests = [Request(n, split, f"p{n}", "user", 0.0, (7,) * n) for n in reversed(LENGTHS)]
    ordered = [request for batch in batches(requests, 5) for request in batch]
    assert [len(request.prompt) for request in ordered] == list(LENGTHS)
    return [Response(request, (1,) * tokens, False) for request in ordered]


def test_the_middle_of_every_part_is_taken():
    assert spread(list(range(10)), 5) == [1, 3, 5, 7, 9]
    assert spread(list(range(12)), 4) == [1, 4, 7, 10]
    assert spread([1, 2, 3], 1) == [2]
    assert spread([3], 4) == [3]
    assert spread([], 4) == []


@given(st.integers(1, 60), st.integers(1, 60))
def test_no_item_twice_all_in_order_and_none_preferred(many, count):
    found = spread(range(many), count)
    assert found == sorted(set(found))
    assert len(found) == min(many, count)
    assert abs(sum(found) / len(found) - (many - 1) / 2) <= 0.5  # the mean place is that of all


def test_timed_prompts_are_as_long_as_the_others():
    texts = answers("test")
    held = HeldOut([[1.0] * 16 for _ in texts], {}, 1, [[] for _ in texts])
    found = plan.make(texts, held, COSTS, 1, GREEDY, Decoding(prompts=4), 0)
    assert [len(heat.answer.request.prompt) for heat in found.heats] == [21, 15, 9, 3]


def test_short_answers_have_no_part_in_it():
    texts = [*answers("test", tokens=15), *answers("test")]
    held = HeldOut([[0.5] * len(text.tokens) for text in texts], {}, 1, [[] for _ in texts])
    found = plan.make(texts, held, COSTS, 1, GREEDY, Decoding(prompts=3), 0)
    assert [(heat.new_tokens, len(heat.answer.request.prompt)) for heat in found.heats] == [(16, 20), (16, 12), (16, 4)]
    with pytest.raises(PipelineError, match=r"decoding\.max_new_tokens=80: no test answer at temperature 0 has 16 tokens"):
        plan.make(texts[:24], HeldOut(held.acceptance[:24], {}, 1, held.deeper[:24]), COSTS, 1, GREEDY, Decoding(), 0)


def test_calibration_times_prompts_of_all_lengths(tmp_path, monkeypatch):
    context, seen = finished(tmp_path), []
    write_shard(context.parent(Stage.generate).folder / "shard-00000.parquet", answers())

    def recorded(target, draft, prompts, *rest):
        seen.extend(map(len, prompts))
        return repeat(COSTS)

    monkeypatch.setattr(calibrate, "measure", recorded)
    monkeypatch.setattr(calibrate, "initial", lambda context: (Draft(tiny()), 1.0))
    context.config.decoding.temperatures.remove(1.0)
    calibrate.run(context, tmp_path, None)
    assert seen == [23, 19, 16, 12, 9, 6, 2]


def test_drafters_are_set_on_prompts_of_all_lengths(monkeypatch):
    seen, set_on = [], []

    def recorded(target, draft, prompts, *rest):
        seen.append([len(prompt) for prompt in prompts])
        return repeat(Costs(0.02, 0.25, (0.9, 1.0, 1.0), (0.1, 0.25, 0.25)))

    def chosen(target, draft, texts, *rest):
        set_on.extend(len(text.request.prompt) for text in texts)
        return trees.Choice(trees.Tree.of((1,)), [[1.0]], 1.0, 2.0, True)

    target = tiny()
    monkeypatch.setattr(contestants, "measure", recorded)
    monkeypatch.setattr(trees, "calibrated", lambda *rest: repeat(None))
    monkeypatch.setattr(trees, "choose", chosen)
    model = contestants.Trained("draft model", Draft(target), 1.0)
    options = Decoding(tree="auto", longest_draft=2, max_new_tokens=2)
    contestants.ways(target, model, None, answers(tokens=2), GREEDY, options, 0)
    assert seen == [[21, 15, 9, 3]]
    assert len(set_on) == 10
    assert (max(set_on), min(set_on)) == (23, 2)
