"""A response gets the same targets beside others in a row, in blocks, and alone."""

from dataclasses import replace

import pytest
import torch

from data.documents import Packed
from data.responses import Request, Response
from pipeline import forward as passes
from pipeline.forward import forward
from tests.speculative.tiny import tiny

LENGTHS = ((3, 5), (9, 11), (1, 1), (4, 7), (12, 2))  # prompt, response


@pytest.fixture
def batch() -> list[Response]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for key, (prompt, response) in enumerate(LENGTHS):
        ids = tuple(torch.randint(48, (prompt + response,), generator=generator).tolist())
        made.append(Response(Request(key, "train", "", "", 1.0, ids[:prompt]), ids[prompt:], False))
    return made


@torch.inference_mode()
def alone(model, batch: list[Response], hidden: bool) -> list[torch.Tensor]:
    """The oracle: one plain forward for each response."""
    found = []
    for response in batch:
        ids = torch.tensor([response.request.prompt + response.tokens])
        whole = model.base_model(input_ids=ids, use_cache=False).last_hidden_state if hidden else model(input_ids=ids).logits
        found.append(whole[0, len(response.request.prompt) - 1 : -1])
    return found


def close(found, wanted) -> bool:
    return all(f.shape == w.shape and torch.allclose(f, w, atol=1e-4, rtol=1e-4) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "gemma"])
@pytest.mark.parametrize("hidden", [False, True])
def test_in_shared_rows(batch, kind, implementation, hidden, monkeypatch):
    model, seen = tiny(kind, implementation=implementation), []
    plain = passes.pack
    monkeypatch.setattr(passes, "pack", lambda *given, **more: seen.append(plain(*given, **more)) or seen[-1])
    with torch.inference_mode():
        assert close(forward(model, batch, hidden), alone(model, batch, hidden))
    assert [packed.shared for packed in seen] == [True]


@pytest.mark.parametrize("fault", ["mask", "positions"])
def test_a_boundary_that_is_not_respected_is_noticed(batch, fault, monkeypatch):
    model, plain = tiny(), passes.pack
    if fault == "mask":
        monkeypatch.setattr(
            Packed, "mask", lambda self: torch.ones(len(self.tokens), 1, *[self.tokens.shape[1]] * 2).tril().bool()
        )
    else:
        counted = torch.arange(20).expand(3, 20)
        monkeypatch.setattr(passes, "pack", lambda *given: replace(plain(*given), positions=counted))
        model = tiny("gpt2")  # positions that rotate are relative, so a shift of all of them changes nothing
    with torch.inference_mode():
        assert not close(forward(model, batch, False), alone(model, batch, False))


@pytest.mark.parametrize("block", [1, 4, 7, 14, 20])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("hidden", [False, True])
def test_documents_longer_than_a_block(batch, kind, block, hidden, monkeypatch):
    model = tiny(kind)
    monkeypatch.setattr(passes, "BLOCK", block)
    with torch.inference_mode():
        assert close(forward(model, batch, hidden), alone(model, batch, hidden))


def test_a_model_that_reads_no_positions_gets_a_row_for_each(batch, monkeypatch):
    def refuse(model):
        raise passes.UnsupportedModelError("it takes slots for positions")

    monkeypatch.setattr(passes, "check_branching", refuse)
    seen, plain = [], passes.pack
    monkeypatch.setattr(passes, "pack", lambda *given, **more: seen.append(plain(*given, **more)) or seen[-1])
    with torch.inference_mode():
        assert close(forward(tiny(), batch, False), alone(tiny(), batch, False))
    assert [packed.shared for packed in seen] == [True, False]


def test_rows_of_the_head_that_are_padding_are_left_out(batch):
    with torch.inference_mode():
        whole, cut = forward(tiny(), batch, False), forward(tiny(), batch, False, 40)
        assert close(cut, [row[:, :40] for row in whole])
        assert {row.shape[1] for row in forward(tiny(), batch, True, 40)} == {32}
