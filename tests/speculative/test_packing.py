"""Packed weights change the speed of a product and nothing else."""

import copy

import pytest
import torch
from torch import nn

import speculative
from speculative import Draft
from speculative.packing import pack
from tests.speculative.tiny import perturbed, tiny

pytestmark = pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="weights are packed on x86 processors only"
)


@pytest.fixture
def model():
    return tiny()


def packed_layers(model):
    return [m for m in model.modules() if isinstance(m, nn.Linear) and getattr(m, "packed", None) is not None]


def test_every_linear_layer_is_packed_and_gives_the_same_product(model):
    plain = copy.deepcopy(model)
    assert pack(model) is model
    assert len(packed_layers(model)) == sum(isinstance(m, nn.Linear) for m in plain.modules()) > 0
    for count in (1, 2, 5, 40):
        tokens = torch.arange(2 * count).view(2, count) % model.config.vocab_size
        with torch.inference_mode():
            torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, rtol=1e-4, atol=1e-5)


def test_the_packed_product_is_the_one_that_runs(model):
    """A packed copy of other numbers must show, or the test above would compare a layer with itself."""
    pack(model)
    layer = packed_layers(model)[0]
    layer.packed.weight = torch.ops.mkldnn._reorder_linear_weight(torch.zeros_like(layer.weight))
    with torch.inference_mode():
        assert layer(torch.ones(1, layer.in_features)).abs().max() == 0


@pytest.mark.parametrize("change", ["in place", "replaced", "other format"])
def test_weights_that_change_afterwards_count(model, change):
    layer = packed_layers(pack(model))[0]
    if change == "in place":
        with torch.no_grad():
            layer.weight.mul_(2)
    elif change == "replaced":
        layer.weight.data = layer.weight.data * 2
    else:
        model.double()
    x = torch.randn(3, layer.in_features, dtype=layer.weight.dtype)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    if change != "other format":
        pack(model)
        assert layer.packed.of[1] == layer.weight._version


def test_a_packed_model_still_learns(model):
    pack(model)
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(layer.weight.grad is not None for layer in packed_layers(model))


def test_copies_and_files_know_nothing_of_it(model, tmp_path):
    keys = list(model.state_dict())
    pack(model)
    assert list(model.state_dict()) == keys
    other = copy.deepcopy(model)
    assert not packed_layers(other)
    with torch.inference_mode():
        torch.testing.assert_close(other(torch.tensor([[1, 2]])).logits, model(torch.tensor([[1, 2]])).logits)
    model.save_pretrained(tmp_path)
    assert not packed_layers(type(model).from_pretrained(tmp_path))


def test_bfloat16_is_packed_where_onednn_has_it():
    plain = tiny().to(torch.bfloat16)
    model = pack(copy.deepcopy(plain))
    assert bool(packed_layers(model)) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for count in (1, 3, 40):
        tokens = torch.arange(2 * count).view(2, count) % model.config.vocab_size
        with torch.inference_mode():
            torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, rtol=2e-2, atol=2e-2)


def test_other_formats_are_left_alone():
    assert not packed_layers(pack(tiny().double()))


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_decoding_writes_what_it_wrote(model, drafts):
    prompts = [[1, 5, 9], [3, 2, 7, 7, 4]]
    draft = Draft(perturbed(model))
    options = {"max_new_tokens": 24, "num_draft_tokens": drafts}
    wanted = speculative.generate(model, draft, prompts, **options)
    found = speculative.generate(pack(model), Draft(pack(draft.model)), prompts, **options)
    assert found.tokens == wanted.tokens
