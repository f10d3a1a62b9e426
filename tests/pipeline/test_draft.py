"""A draft is its target's own parts: the same logits where nothing was cut, and the same again after a round trip."""

import copy
import json
from dataclasses import asdict

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from pipeline.config import Draft as DraftConfig
from pipeline.draft import build, choose_vocabulary, load, save, shape, smallest_vocabulary
from pipeline.errors import PipelineError
from speculative import Draft

FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
TOKENS = torch.tensor([[7, 3, 49, 0, 21, 21, 8]])
KEPT = torch.tensor([0, 3, 4, 17, 49])


def tiny(family: str = "llama", tied: bool = True, seed: int = 0) -> PreTrainedModel:
    options = {"head_dim": 4} if family == "qwen3" else {}
    config = FAMILIES[family](
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        **options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        for p in model.parameters():  # norms and biases that are not one and zero would hide a mix-up
            if p.ndim == 1:
                p.data += 0.2 * torch.randn_like(p)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(input_ids=TOKENS, use_cache=False).logits


every_model = pytest.mark.parametrize(("family", "tied"), [(f, t) for f in FAMILIES for t in (True, False)])


def test_the_vocabulary_by_hand():
    texts = [[5, 5, 5, 9], (9, 2), iter([7])]  # 5: 3, 9: 2, 2: 1, 7: 1
    chosen, covered = choose_vocabulary(texts, 3, [])
    assert chosen.tolist() == [2, 5, 9]  # of 2 and 7, tied, the smaller id
    assert covered == pytest.approx(6 / 7)


def test_eos_ids_are_inside_whatever_their_count():
    chosen, covered = choose_vocabulary([[5, 5, 9, 9, 2]], 3, [40, 2])
    assert chosen.tolist() == [2, 5, 40]  # 5 and 9 are tied
    assert covered == pytest.approx(3 / 5)
    assert choose_vocabulary([[5] * 9], 2, [5, 5, 1])[0].tolist() == [1, 5]


def test_unseen_ids_fill_the_vocabulary_in_order():
    chosen, covered = choose_vocabulary([[1, 4, 4]], 6, [2])
    assert chosen.tolist() == [0, 1, 2, 3, 4, 5]
    assert covered == 1.0
    assert choose_vocabulary([[90, 1]], 4, [0])[0].tolist() == [0, 1, 2, 90]
    chosen, covered = choose_vocabulary([], 3, [1])
    assert (chosen.tolist(), covered) == ([0, 1, 2], 0.0)


def test_a_full_vocabulary_is_every_id():
    assert choose_vocabulary([[49, 3]], 50, [7])[0].tolist() == list(range(50))


def test_the_least_vocabulary_that_covers_by_hand():
    texts = [[5, 5, 5, 9], (9, 2, 7)]  # 5: 3, 9: 2, 2: 1, 7: 1
    for share, size in ((0.4, 2), (3 / 7, 2), (0.5, 3), (5 / 7, 3), (0.8, 4), (1.0, 5)):
        assert smallest_vocabulary(texts, share, [40]) == size, share  # id 40 is in it and covers nothing
        covered = choose_vocabulary(texts, size, [40])[1]
        assert covered >= share - 1e-9
        assert size == 2 or choose_vocabulary(texts, size - 1, [40])[1] < share
    assert smallest_vocabulary(texts, 0.4, [5]) == 2  # what must be in it counts; one more id, so that there is a choice


@every_model
def test_a_whole_draft_has_its_targets_logits(family, tied):
    target = tiny(family, tied)
    draft = build(target, DraftConfig(layers=[]), None)
    assert draft.vocabulary is None
    assert torch.equal(logits(draft.model), logits(target))


@every_model
def test_a_trimmed_head_has_its_targets_logits_at_its_ids(family, tied):
    target = tiny(family, tied)
    draft = build(target, DraftConfig(layers=[0, 1, 2, 3]), KEPT)
    assert logits(draft.model).shape == (1, 7, 5)
    torch.testing.assert_close(logits(draft.model), logits(target)[..., KEPT], atol=1e-6, rtol=1e-6)


@every_model
@pytest.mark.parametrize("layers", [[0, -1], [2, 1], [-2], [3, 3, 0]])
def test_the_chosen_layers_are_the_targets_in_that_order(family, tied, layers):
    target = tiny(family, tied)
    draft = build(target, DraftConfig(layers=layers), None)
    cut = copy.deepcopy(target)
    cut.model.layers = nn.ModuleList([target.model.layers[i] for i in layers])
    cut.config.num_hidden_layers = len(layers)
    assert draft.model.config.num_hidden_layers == len(layers)
    torch.testing.assert_close(logits(draft.model), logits(cut), atol=1e-6, rtol=1e-6)
    assert not torch.allclose(logits(draft.model), logits(target), atol=1e-2)


@pytest.mark.parametrize("tied", [True, False])
def test_training_a_draft_leaves_its_target_alone(tied):
    target = tiny(tied=tied)
    before = logits(target)
    draft = build(target, DraftConfig(layers=[0, -1]), KEPT)
    with torch.no_grad():
        for p in draft.model.parameters():
            p.add_(1.0)
    assert torch.equal(logits(target), before)
    assert target.config.num_hidden_layers == 4
    assert target.config.tie_word_embeddings is tied


def test_a_draft_of_a_low_precision_target_is_float32():
    target = tiny().to(torch.bfloat16)
    draft = build(target, DraftConfig(layers=[0]), KEPT)
    assert {p.dtype for p in draft.model.parameters()} == {torch.float32}
    assert torch.equal(draft.model.get_output_embeddings().weight, target.get_output_embeddings().weight[KEPT].float())


@pytest.mark.parametrize("layers", [[4], [0, -5]])
def test_a_layer_that_is_not_there_is_named(layers):
    with pytest.raises(PipelineError, match=rf"draft\.layers=\[{layers[-1]}\]: the model has layers 0 … 3"):
        build(tiny(), DraftConfig(layers=layers), None)


@every_model
@pytest.mark.parametrize("vocabulary", [None, KEPT])
def test_a_draft_survives_its_folder_bit_for_bit(tmp_path, family, tied, vocabulary):
    draft = build(tiny(family, tied), DraftConfig(layers=[0, -1]), vocabulary)
    save(draft, tmp_path / "deep" / "draft")
    loaded = load(tmp_path / "deep" / "draft", torch.float32)
    assert not loaded.model.training
    assert torch.equal(logits(loaded.model), logits(draft.model))
    if vocabulary is None:
        assert loaded.vocabulary is None
    else:
        assert torch.equal(loaded.vocabulary, vocabulary)
    assert json.loads((tmp_path / "deep" / "draft" / "shape.json").read_text()) == asdict(shape(draft))


def test_a_draft_loads_in_the_precision_that_is_asked_for(tmp_path):
    draft = build(tiny(), DraftConfig(layers=[0]), KEPT)
    save(draft, tmp_path)
    loaded = load(tmp_path, torch.bfloat16)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.vocabulary.dtype is torch.int64


def test_a_tied_model_survives_its_folder_tied(tmp_path):
    target = tiny(tied=True)
    save(Draft(target), tmp_path)
    loaded = load(tmp_path, torch.float32).model
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert torch.equal(logits(loaded), logits(target))


def test_the_shape_by_hand():
    # One layer: q and o 16·16, k and v 16·8, three MLP matrices 16·32, two norms of 16.
    layer = 2 * 256 + 2 * 128 + 3 * 512 + 2 * 16
    trimmed = shape(build(tiny(), DraftConfig(layers=[0, -1]), KEPT))
    read = 2 * layer + 16 + 5 * 16
    assert asdict(trimmed) == {
        "layers": 2,
        "width": 16,
        "vocabulary": 5,
        "parameters": read + 50 * 16,  # a step looks up one row of the embedding
        "read_per_step": read,
        "heads": 0,
        "head_rank": 0,
    }
    whole = build(tiny(tied=True), DraftConfig(layers=[]), None)
    assert shape(whole).parameters == 4 * layer + 16 + 2 * 800  # the head is a copy of its own
    tied = shape(Draft(tiny(tied=True)))
    assert tied.parameters == tied.read_per_step == 4 * layer + 16 + 800
