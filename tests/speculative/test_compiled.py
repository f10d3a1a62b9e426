"""Compiled forwards change the speed of decoding and nothing else. One pair of models is compiled for the whole file."""

import copy
import shutil

import pytest
import torch

import speculative
from speculative import Draft, NotCompiledError, Sampling, compiled, generate
from speculative.cache import CachedModel
from speculative.compiled import Program
from tests.speculative.oracles import PROMPTS, keys_and_values
from tests.speculative.tiny import perturbed, tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs a C++ compiler"),
]
NEW = 24


@pytest.fixture(scope="module")
def pair():
    target = tiny()
    return compiled(target), Draft(compiled(perturbed(target)))


@pytest.fixture(scope="module")
def plain(pair):
    target, draft = pair
    return copy.deepcopy(target), Draft(copy.deepcopy(draft.model))


@pytest.fixture
def calls(monkeypatch):
    """The numbers of tokens that the program was called with."""
    counts, real = [], Program.__call__

    def counted(self, tokens, *others):
        counts.append(tokens.shape[1])
        return real(self, tokens, *others)

    monkeypatch.setattr(Program, "__call__", counted)
    return counts


@pytest.mark.parametrize("shape", [{"num_draft_tokens": k} for k in (0, 1, 3)] + [{"tree": (2, 2, 1)}], ids=str)
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0, top_p=0.9)], ids=["greedy", "sampled"])
def test_answers_are_those_of_the_models_as_they_were(pair, plain, shape, sampling, calls):
    for prompt in PROMPTS[:3]:
        options = {"max_new_tokens": NEW, "sampling": sampling, "seed": 3, **shape}
        found, expected = (generate(*models, [prompt], **options) for models in (pair, plain))
        assert found.tokens == expected.tokens
        assert found.acceptance == expected.acceptance
    block = 1 + shape.get("num_draft_tokens", 2 + 4 + 4)  # the anchor and what is drafted
    assert max(calls) == block  # by the compiled pair; the other has no program


def test_the_cache_is_that_of_a_fresh_prefill(pair, plain):
    target, tokens = pair[0], [5, 9, 3, 7, 1, 2, 8, 4]
    cached = CachedModel(target, 1, 40)
    with torch.inference_mode():
        cached.prefill(torch.tensor([tokens]), torch.tensor([3]))
        cached.feed(torch.tensor([[30, 31]]), torch.tensor([[3, 4]]), keep=1)  # to be overwritten
        for piece in (slice(3, 4), slice(4, 7), slice(7, 8)):  # one token stands twice in what the program is given
            logits = cached.feed(torch.tensor([tokens[piece]]), torch.arange(8)[None, piece], keep=1)
        for layer, fresh in zip(cached.cache.layers, keys_and_values(plain[0], tokens), strict=True):
            for store, want in zip((layer.keys, layer.values), fresh, strict=True):
                torch.testing.assert_close(store[:, :, : len(tokens)], want, rtol=0, atol=1e-5)
        torch.testing.assert_close(logits[0, -1], plain[0](torch.tensor([tokens])).logits[0, -1], rtol=0, atol=1e-4)


def test_capacity_and_width_need_no_new_program(pair, calls):
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for length, drafted in ((3, 2), (9, 5), (50, 7)):
        generate(*pair, [[5] * length], max_new_tokens=12, num_draft_tokens=drafted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    assert {1, 3, 6, 8} <= set(calls)


def test_batches_and_kept_states_run_as_they_are(pair, plain, calls):
    done = generate(pair[0], None, PROMPTS[:3], max_new_tokens=8)
    assert done.tokens == generate(plain[0], None, PROMPTS[:3], max_new_tokens=8).tokens
    kept = generate(pair[0], None, PROMPTS[:1], max_new_tokens=4, states=True)
    assert not calls
    assert kept.states[0].shape == (4, 32)


def test_the_weights_are_constants_of_the_program():
    """Else products do not use the layout that makes several rows cost one; torch says nothing of it."""
    model = compiled(tiny())
    cached, prompt = CachedModel(model, 1, 40), torch.tensor([[5, 9, 3, 7]])
    with torch.inference_mode():
        cached.prefill(prompt, torch.tensor([3]))
        logits = []
        for _ in range(2):
            logits.append(cached.feed(prompt[:, 3:], torch.tensor([[3]]), keep=1))
            model.model.layers[0].mlp.up_proj.weight.data.mul_(4.0)  # behind the back of what turns to the model as it is
    assert torch.equal(*logits)


def test_weights_that_change_afterwards_count(pair, calls):
    model = copy.deepcopy(pair[0])
    assert model.program is None
    model.program = Program(model)
    with torch.no_grad():
        model.model.norm.weight.mul_(2.0)
    generate(model, None, PROMPTS[:1], max_new_tokens=4)
    assert not calls


def test_a_program_that_computes_something_else_is_refused(pair, monkeypatch):
    model = copy.deepcopy(pair[0])
    monkeypatch.setattr(Program, "__call__", lambda self, tokens, *others: torch.zeros(1, tokens.shape[1], 48))
    with pytest.raises(NotCompiledError, match="llama: its compiled program gives other logits"):
        compiled(model)
    assert model.program is None


def test_a_model_that_does_not_compile_is_refused_by_name(monkeypatch):
    model = tiny()
    inner = model.model.forward

    def forward(*args, **options):
        done = inner(*args, **options)
        assert float(done.last_hidden_state.sum()) != 1e9  # leaves the program
        return done

    monkeypatch.setattr(model.model, "forward", forward)
    with pytest.raises(NotCompiledError, match="llama: it does not compile here"):
        compiled(model)
    assert speculative.generate(model, None, PROMPTS[:1], max_new_tokens=2).tokens
