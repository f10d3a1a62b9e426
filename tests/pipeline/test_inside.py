"""What the notebook colours is what greedy decoding does."""

from collections import Counter
from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import speculative
from data.responses import Request, Response
from pipeline import inside, tiny
from pipeline.inside import Kind, coloured, rounds, shaded
from speculative import Draft, Sampling
from speculative.metrics import total

PROMPT = (5, 6, 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("inside") / "tiny"
    tiny.make(place, seed=0)
    return place


@pytest.fixture(scope="module")
def models(folder):
    """A target, and a draft that agrees with it now and then and knows every other id."""
    target, draft = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.35 * parameter.std() * torch.randn_like(parameter)
    return target, Draft(draft)


def answer_of(target) -> Response:
    done = speculative.generate(target, None, [PROMPT], max_new_tokens=60, sampling=Sampling(0.0))
    return Response(Request(0, "test", "p", "user", 0.0, PROMPT), tuple(done.tokens[0]), False)


def test_rounds_by_hand():
    """K = 2: 1 and 2 are guessed, 3 is a bonus; 9 is no 4; 5 is guessed, then 6 alone is wanted."""
    found = rounds([1, 2, 3, 4, 5, 6], [1, 2, 0, 9, 5, 0], 2)
    assert [[(mark.token, mark.kind.name) for mark in marks] for marks in found] == [
        [(1, "accepted"), (2, "accepted"), (3, "target")],
        [(9, "rejected"), (4, "target")],
        [(5, "accepted"), (6, "target")],
    ]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=30), st.integers(0, 5))
def test_what_stays_is_the_text(pairs, drafts):
    tokens, guessed = [t for t, _ in pairs], [g for _, g in pairs]
    found = rounds(tokens, guessed, drafts)
    assert [mark.token for marks in found for mark in marks if mark.kind is not Kind.rejected] == tokens
    assert all([mark.kind for mark in marks].count(Kind.target) == 1 for marks in found)
    assert all(sum(mark.kind is not Kind.target for mark in marks) <= drafts for marks in found)


@pytest.mark.parametrize("drafts", [1, 2, 4])
def test_the_rounds_are_those_of_the_engine(models, drafts):
    target, draft = models
    answer = answer_of(target)
    found = rounds(answer.tokens, inside.guesses(draft, answer), drafts)
    done = speculative.generate(target, draft, [PROMPT], max_new_tokens=60, num_draft_tokens=drafts, sampling=Sampling(0.0))
    assert done.tokens[0] == list(answer.tokens)
    counts = total(done.acceptance)
    kinds = Counter(mark.kind for marks in found for mark in marks)
    assert 0 < counts.accepted < counts.proposed, "a pair that always or never agrees would show nothing"
    assert (kinds[Kind.accepted], len(found)) == (counts.accepted, counts.target_forwards)


def test_a_draft_with_a_smaller_vocabulary_guesses_the_targets_ids(models):
    target, draft = models
    kept = torch.arange(1, target.config.vocab_size, 2)
    head = torch.nn.Linear(target.config.hidden_size, len(kept), bias=False)
    small = deepcopy(draft.model)
    head.weight.data = small.get_output_embeddings().weight[kept].detach().clone()
    small.set_output_embeddings(head)
    answer = answer_of(target)
    assert set(inside.guesses(Draft(small, kept), answer)) <= set(kept.tolist())


def test_chances_are_one_where_the_draft_is_the_target(models):
    target, _ = models
    found = inside.chances(target, Draft(target), answer_of(target), Sampling(1.0))
    assert found == pytest.approx([1.0] * 60, abs=1e-4)


def test_the_text_is_shown_as_it_is_and_cannot_become_markup(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer("a<b>\n", add_special_tokens=False)["input_ids"]
    shown = coloured(rounds(tokens, [tokens[0], *[0] * (len(tokens) - 1)], 1), tokenizer)._repr_html_()
    assert "&lt;" in shown
    assert "↵\n" in shown
    assert shown.count("class='rejected'") >= 2, "the legend and one that was"
    faint = shaded(tokens, [0.25] * len(tokens), tokenizer)._repr_html_()
    assert faint.count("title='0.25'") == len(tokens)
