"""Accepted tokens of an export beside those of the trained draft: the same rounds, counted by hand and replayed."""

import pytest
import torch

from pipeline import export, parity, stock_reader
from pipeline.errors import PipelineError
from pipeline.parity import acceptance, redrafted
from speculative import Draft
from tests.pipeline.exported import KEPT, Child, config_of, finished, in_this_process, model_of, stage_folder


def test_acceptance_by_hand():
    first = ([1], [5, 6, 7, 8], [[5, 9], [7, 8]])  # one of two; a 6 by the target; two of two
    assert acceptance([first]) == 3 / 4
    second = ([1], [5, 6], [[9], []])  # none; nothing was proposed for the last
    assert acceptance([first, second]) == 3 / 5
    assert acceptance([([1], [5], [[]])]) == 0


def test_the_rounds_of_assisted_generation_are_replayed():
    target = model_of(config_of("llama", tied=False))
    draft = model_of(config_of("llama", tied=False))
    with torch.no_grad():
        for parameter in draft.model.layers[1].parameters():
            parameter += 0.05
    prompts = [[5, 9, 30], [7, 3, 100, 41]]
    answers, proposals = stock_reader.greedy(target, prompts, 12, draft, 2)
    assert not target._forward_pre_hooks
    assert [redrafted(Draft(draft), *one) for one in zip(prompts, answers, proposals, strict=True)] == proposals
    rounds = sum(map(len, proposals))
    written = sum(map(len, answers))
    made = sum(len(round) for one in proposals for round in one)
    assert 0 < made <= 2 * rounds
    found = acceptance(list(zip(prompts, answers, proposals, strict=True)))
    assert found * made == pytest.approx(written - rounds)  # every round writes one token that was not proposed


def test_a_trimmed_draft_proposes_target_ids():
    model = model_of(config_of("llama", tied=False))
    head = torch.nn.Linear(32, len(KEPT), bias=False)
    model.set_output_embeddings(head)
    [[proposed]] = redrafted(Draft(model, KEPT), [5, 9], [4], [[0]])
    assert proposed == int(KEPT[model(input_ids=torch.tensor([[5, 9]])).logits[0, -1].argmax()])


def likeness(**changes):
    found = {"largest_logit_difference": 0.0, "excluded_mass": 0.0, "overlap": 0.5, "overlap_trained": 0.5}
    found |= {"acceptance": 0.5, "acceptance_trained": 0.5, "same_output": True}
    return parity.Likeness(**found | changes)


def test_an_export_whose_tokens_are_accepted_less_often_is_refused():
    parity.require(likeness(acceptance=0.491), "transformers", [])
    with pytest.raises(
        PipelineError, match=r"have 0\.489 of their tokens accepted where the trained draft has 0\.500 in the same"
    ):
        parity.require(likeness(acceptance=0.489), "transformers", [])


def test_what_was_really_accepted_is_compared(tmp_path, monkeypatch):
    """The reader tells of proposals that the trained draft would never make, though the logits are its own."""
    in_this_process(monkeypatch)

    def lucky(order):
        answers = stock_reader.answer(order)
        for form in answers["forms"].values():
            form["proposals"] = [[text] for text in form["assisted"]]
        return answers

    monkeypatch.setattr(parity, "in_a_fresh_process", lucky)
    context = finished(tmp_path)
    with pytest.raises(PipelineError, match=r"have 1\.000 of their tokens accepted where the trained draft has 0\."):
        export.run(context, stage_folder(context), Child())
