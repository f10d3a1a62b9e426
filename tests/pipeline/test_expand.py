"""An expanded draft is a stock model: kept logits as they were, the others out of reach, and the margin is measured."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from data.responses import Request, Response
from pipeline import draft as drafts
from pipeline import speculate, tiny
from pipeline.config import Draft as DraftConfig
from pipeline.draft import build
from pipeline.expand import Expansion, expand, held_out_bound
from speculative import Draft

KEPT = torch.arange(2, 259, 4)
TEXTS = [list(range(5, 40)), [200, 3, 3, 77, 120, 1], [9, 250]]


def trained_like(folder, common: float, vocabulary: torch.Tensor | None = KEPT) -> Draft:
    """A draft of two layers; trained models' hidden states share a direction, to which ``common`` sets the share."""
    tiny.make(folder, seed=0)
    draft = build(AutoModelForCausalLM.from_pretrained(folder), DraftConfig(layers=[0, -1]), vocabulary)
    with torch.no_grad():
        draft.model.get_input_embeddings().weight[:] += common
    return draft


@torch.no_grad()
def logits(model, text: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([text]), use_cache=False).logits[0]


def excluded_mass(model, texts=TEXTS) -> float:
    p = torch.cat([logits(model, text) for text in texts]).double().softmax(-1)
    p[:, KEPT] = 0
    return float(p.sum(-1).max())


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> Draft:
    return trained_like(tmp_path_factory.mktemp("tiny"), common=2.0)


def test_kept_logits_are_unchanged_and_the_others_out_of_reach(draft):
    expansion = expand(draft, TEXTS)
    for text in TEXTS:
        wide, narrow = logits(expansion.model, text), logits(draft.model, text)
        assert wide.shape == (len(text), 259)
        torch.testing.assert_close(wide[:, KEPT], narrow, atol=1e-5, rtol=1e-5)
        assert torch.equal(KEPT[narrow.argmax(-1)], wide.argmax(-1))
    assert expansion.excluded_mass < 1e-12
    assert expansion.excluded_mass == pytest.approx(excluded_mass(expansion.model), rel=1e-2)


class Widest(TorchDispatchMode):
    """The most rows of any matrix with a column for each kept id."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        logits = isinstance(made, torch.Tensor) and made.ndim == 2 and made.shape[1] == len(KEPT) and made.is_contiguous()
        self.rows = max(self.rows, len(made)) if logits else self.rows
        return made


def test_the_logits_of_one_text_at_a_time_are_held(draft):
    texts = [list(range(50 + n, 90 + n)) for n in range(6)]
    with Widest() as seen:
        expand(draft, texts)
    assert seen.rows == 40


def test_the_bound_by_hand():
    """Two states (1, 2) and (3, 0.5) of a head with one row (0, 1): projections 1 and 3 on (1, 0), log-sums 2 and 0.5."""
    states = {1: torch.tensor([[1.0, 2.0]]), 2: torch.tensor([[3.0, 0.5]])}

    def base(input_ids, use_cache):
        return SimpleNamespace(last_hidden_state=states[int(input_ids[0, 0])][None])

    head = SimpleNamespace(weight=torch.tensor([[0.0, 1.0]]))
    model = SimpleNamespace(base_model=base, get_output_embeddings=lambda: head)
    expansion = Expansion(model, 0.0, torch.tensor([1.0, 0.0]), scale=2.0, excluded=7)
    found = held_out_bound(expansion, SimpleNamespace(model=model), [[1], [2]])
    outside = 7 * math.exp(-2.0 * 1.0)  # the least projection, with the least log-sum although of another state
    assert found.mass == pytest.approx(outside / (outside + math.exp(0.5)), rel=1e-5)
    assert found.positions == 2


def test_the_bound_holds_for_every_held_out_state(draft):
    expansion = expand(draft, TEXTS[:1])
    found = held_out_bound(expansion, draft, TEXTS[1:])
    assert excluded_mass(expansion.model, TEXTS[1:]) <= found.mass * (1 + 1e-4) < 1e-4
    assert found.positions == len(TEXTS[1]) + len(TEXTS[2])


def test_nothing_is_excluded_from_a_whole_draft(tmp_path):
    whole = trained_like(tmp_path / "tiny", common=0.0, vocabulary=None)
    assert held_out_bound(expand(whole, TEXTS), whole, TEXTS).mass == 0.0


def test_an_expanded_draft_is_no_inference_tensor(draft):
    model = expand(draft, TEXTS).model
    assert not any(parameter.is_inference() for parameter in model.parameters())


def test_the_mass_is_measured_and_not_assumed(tmp_path):
    # More random hidden states than dimensions: no direction serves them all.
    texts = [torch.randint(259, (200,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(3)]
    expansion = expand(trained_like(tmp_path / "tiny", common=0.0), texts)
    assert expansion.excluded_mass > 0.1
    assert expansion.excluded_mass == pytest.approx(excluded_mass(expansion.model, texts), rel=1e-3)


def test_the_margin_carries_over_to_text_that_was_not_seen(draft):
    expansion = expand(draft, TEXTS[:1])
    for text in TEXTS[1:]:
        assert excluded_mass(expansion.model, [text]) < 1e-6


def test_an_expanded_draft_loads_as_a_stock_model(tmp_path, draft):
    expansion = expand(draft, TEXTS)
    expansion.model.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert loaded.get_output_embeddings().weight.shape == (259, 64)
    assert torch.equal(logits(loaded.eval(), TEXTS[0]), logits(expansion.model, TEXTS[0]))


def test_a_whole_draft_stays_as_it_is(tmp_path):
    draft = trained_like(tmp_path / "tiny", common=0.0, vocabulary=None)
    expansion = expand(draft, TEXTS)
    assert expansion.excluded_mass == 0.0
    assert expansion.model is draft.model


@pytest.mark.parametrize("rows", [250, 300])
def test_the_rows_are_the_targets(rows, draft):
    kept = KEPT[rows > KEPT]
    narrow = Draft(draft.model, draft.vocabulary)
    if rows < 259:  # a target that pads less than the draft's source did
        narrow = trained_rows(draft, kept)
    texts = [[token for token in text if token < rows] for text in TEXTS]
    model = expand(narrow, texts, rows).model
    assert model.get_input_embeddings().weight.shape[0] == model.get_output_embeddings().weight.shape[0] == rows
    assert model.config.vocab_size == rows
    torch.testing.assert_close(logits(model, texts[0])[:, kept], logits(narrow.model, texts[0]), atol=1e-5, rtol=1e-5)


def trained_rows(draft: Draft, kept: torch.Tensor) -> Draft:
    """The same draft with fewer head rows."""
    model = copy.deepcopy(draft.model)
    head = torch.nn.Linear(64, len(kept), bias=False)
    head.weight.data = draft.model.get_output_embeddings().weight.data[: len(kept)].clone()
    model.set_output_embeddings(head)
    return Draft(model, kept)


def test_the_assistant_of_a_race_has_the_target_s_rows(draft, tmp_path):
    drafts.save(draft, tmp_path)
    response = Response(Request(0, "validation", "id", "kind", 1.0, (5, 6, 7)), (8, 9), True)
    config = SimpleNamespace(decoding=SimpleNamespace(baselines=True), draft=DraftConfig())
    context = SimpleNamespace(config=config, target=SimpleNamespace(vocabulary_size=300))
    alone, model = speculate._helpers(context, tmp_path, [response])
    assert alone is None
    assert model.config.vocab_size == model.get_output_embeddings().weight.shape[0] == 300
