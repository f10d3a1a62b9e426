"""What the race is predicted to show follows from agreement and costs, the prompt included."""

import pytest

from data.responses import Request, Response
from pipeline import plan
from pipeline.config import Decoding
from pipeline.errors import PipelineError
from pipeline.held_out import HeldOut
from speculative import Sampling
from speculative.cost import Costs

COSTS = Costs(0.02, draft=0.25, verify=(0.9, 1.0), other=(0.1, 0.25), reading=0.5, draft_reading=0.25)
SHORT = Decoding(max_new_tokens=2, prompts=2)


def made(answers: list[tuple[int, list[float]]], config: Decoding = SHORT) -> plan.Plan:
    """The plan of answers given as tokens of the prompt and chances by position, at K = 1."""
    written = [
        Response(Request(key, "test", "", "", 0.0, (1,) * prompt), (2,) * len(chances), False)
        for key, (prompt, chances) in enumerate(answers)
    ]
    held = HeldOut([chances for _, chances in answers], {}, 1, [[] for _ in answers])
    return plan.make(written, held, COSTS, 1, Sampling(0.0), config, 0)


def test_a_prediction_by_hand():
    """Two tokens in one round of 1.5 plain steps: after four prompt tokens (2 + 2) ÷ (2 + 1 + 1.5)."""
    found = made([(4, [1.0, 1.0])])
    assert [heat.predicted for heat in found.heats] == [pytest.approx(4 / 4.5)]
    assert found.tokens_per_round == 2


def test_a_longer_prompt_leaves_less_to_win():
    short, long = (made([(prompt, [1.0, 1.0])]).predicted for prompt in (1, 40))
    assert short > long


def test_as_many_prompts_as_wanted_each_cut_to_the_wanted_length():
    found = made([(1, [1.0, 1.0, 0.0]), (1, [1.0]), (1, [0.0, 0.0]), (1, [1.0, 1.0])])
    assert [(heat.answer.request.key, heat.new_tokens) for heat in found.heats] == [(0, 2), (3, 2)]


def test_no_answer_that_is_long_enough_is_refused():
    with pytest.raises(PipelineError, match=r"decoding\.max_new_tokens=2: no test answer at temperature 0"):
        made([(1, [1.0])])
