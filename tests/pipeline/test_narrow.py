"""A narrower draft by hand: its shape, the embedding it sees, its beginning from the seed, and its way out as a stock model."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from pipeline.draft import load, save
from pipeline.errors import PipelineError
from pipeline.expand import expand
from pipeline.head_fit import fit_head
from pipeline.narrow import build, principal_axes
from tests.pipeline.test_draft import FAMILIES, KEPT, TOKENS, logits, tiny
from tests.pipeline.test_head_fit import batches


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shape_by_hand(family):
    # The target: width 16, four heads of 4, two of them to a key, MLP of 32.
    draft = build(tiny(family), 8, 3, KEPT, seed=0)
    config = draft.model.config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (8, 16, 3)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 1, 4)
    assert type(draft.model) is type(tiny(family))
    assert logits(draft.model).shape == (1, 7, 5)
    assert torch.isfinite(logits(draft.model)).all()


def test_axes_are_orthonormal_and_lose_nothing_that_lies_in_them():
    generator = torch.Generator().manual_seed(0)
    planted = torch.randn(50, 3, generator=generator) @ torch.randn(3, 16, generator=generator)
    axes = principal_axes(planted, 3)
    torch.testing.assert_close(axes.T @ axes, torch.eye(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(planted @ axes @ axes.T, planted, atol=1e-4, rtol=1e-4)
    lengths = (planted @ axes).square().sum(0)
    assert lengths.tolist() == sorted(lengths.tolist(), reverse=True)


def test_it_begins_from_its_seed_and_leaves_the_global_generator_alone():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first = build(tiny(), 8, 2, KEPT, seed=1)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(logits(build(tiny(), 8, 2, KEPT, seed=1).model), logits(first.model))
    assert not torch.equal(logits(build(tiny(), 8, 2, KEPT, seed=2).model), logits(first.model))


@pytest.mark.parametrize("vocabulary", [None, KEPT])
def test_a_fitted_head_survives_its_folder_and_becomes_a_stock_model(tmp_path, vocabulary):
    draft = build(tiny(), 8, 2, vocabulary, seed=0)
    fit_head(draft, tiny(), batches())
    save(draft, tmp_path)
    loaded = load(tmp_path, torch.float32)
    assert torch.equal(logits(loaded.model), logits(draft.model))
    stock = expand(loaded, [TOKENS[0].tolist()], 50)
    assert stock.model.config.vocab_size == 50
    wanted = logits(draft.model).log_softmax(-1)
    found = logits(stock.model).log_softmax(-1)
    torch.testing.assert_close(found if vocabulary is None else found[..., vocabulary], wanted, atol=1e-4, rtol=1e-4)
    assert stock.excluded_mass < 1e-6


@pytest.mark.parametrize("width", [4, 12, 16, 0, -8])
def test_a_width_that_whole_heads_do_not_fill_is_refused(width):
    with pytest.raises(PipelineError, match=rf"^draft\.width={width}: give a multiple of 8 .heads of 4, 2 to a key. below 16"):
        build(tiny(), width, 2, None, seed=0)


def test_an_architecture_without_key_heads_is_refused():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16))
    with pytest.raises(PipelineError, match=r"^draft\.width=8: gpt2 has no intermediate_size; set draft\.width=null"):
        build(model, 8, 1, None, seed=0)
