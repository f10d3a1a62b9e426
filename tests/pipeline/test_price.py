"""The price of a widened head: rounds and steps counted from outside transformers, and the reckoning by hand."""

import copy

import pytest
import torch

from pipeline import baselines, price
from pipeline.draft import Shape
from speculative import Sampling
from speculative.cost import Costs
from tests.pipeline.exported import config_of, model_of

GREEDY = Sampling(0.0)
PROMPT = [5, 9, 30]


@pytest.fixture(scope="module")
def target():
    return model_of(config_of("llama", tied=False))


@pytest.fixture(scope="module")
def stranger():
    """Draws nothing that the target writes: its head is the target's turned upside down."""
    model = copy.deepcopy(model_of(config_of("llama", tied=False)))
    with torch.no_grad():
        model.get_output_embeddings().weight.neg_()
    return model


def decoded(target, assistant):
    return baselines.decode(target, PROMPT, 8, Sampling(0.0), 0, assistant, draft_tokens=2)


def test_a_twin_is_accepted_whole(target):
    done = decoded(target, copy.deepcopy(target))
    assert (len(done.target_forwards), len(done.draft_forwards)) == (3, 5)  # 3 + 3 + 2 tokens, of 2 + 2 + 1 drafts
    assert len(decoded(target, None).target_forwards) == 8
    assert decoded(target, None).draft_forwards == []


def test_a_stranger_is_never_accepted(target, stranger):
    done = decoded(target, stranger)
    assert len(done.target_forwards) == 8
    assert len(done.draft_forwards) == 2 * 6 + 1  # the last token but one leaves room for one draft, the last for none


def test_seconds_are_of_forwards_and_clocks_are_taken_away(target):
    twin = copy.deepcopy(target)
    done = decoded(target, twin)
    assert 0 < sum(done.target_forwards) + sum(done.draft_forwards) < done.seconds
    assert not target._forward_hooks
    assert not twin._forward_pre_hooks


def test_counts_and_medians_by_hand():
    rows = [
        {
            "new_tokens": 8,
            "transformers_forwards": [9.0, 2.0, 2.0],
            "assisted_forwards": [3.0] * 3,
            "drafting_forwards": [0.5] * 5,
        },
        {"new_tokens": 4, "transformers_forwards": [2.0, 2.0], "assisted_forwards": [3.0] * 3, "drafting_forwards": [9.0] * 3},
    ]
    found = price.measured(rows)
    assert (found["rounds"], found["proposed"], found["accepted"]) == (6, 8, 6)
    assert (found["acceptance_rate"], found["tokens_per_round"]) == (0.75, 2.0)
    assert (found["plain_step_seconds"], found["draft_step_seconds"], found["draft_step"]) == (2.0, 0.5, 0.25)
    beside = price.beside(found, Costs(0.05, 0.2, (1.0,), (0.0,)))
    assert (beside["draft_step_here"], beside["draft_step_seconds_here"]) == (0.2, pytest.approx(0.01))


def test_a_whole_vocabulary_by_hand():
    shape = Shape(layers=2, width=10, vocabulary=50, parameters=0, read_per_step=0)
    found = price.whole_vocabulary(shape, rows=200, coverage=0.8, overlap=0.4, drafts=2, bytes_each=4)
    assert (found["head_bytes"], found["head_bytes_here"]) == (8000, 2000)
    assert found["tokens_per_round_trimmed"] == pytest.approx(1 + 0.4 + 0.16)
    assert found["tokens_per_round_whole"] == pytest.approx(1 + 0.5 + 0.25)
    assert found["ratio"] == pytest.approx(1.75 / 1.56)


def test_nothing_is_won_where_all_text_is_covered_or_all_is_right():
    shape = Shape(layers=2, width=10, vocabulary=50, parameters=0, read_per_step=0)
    assert price.whole_vocabulary(shape, 200, 1.0, 0.4, 2, 4)["ratio"] == 1
    assert price.whole_vocabulary(shape, 200, 0.8, 1.0, 2, 4)["tokens_per_round_whole"] == 3
