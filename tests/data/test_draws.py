"""Draws depend on their names alone and follow their weights; the largest of many are the largest."""

import math

import pytest
import torch

from data import draws
from data.topk import largest


def noise(positions: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(positions, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def test_a_draw_depends_on_seed_key_and_position_alone():
    whole = draws.uniforms(3, 7, 20, 5)
    assert torch.equal(draws.uniforms(3, 7, 11, 5), whole[:11])
    assert torch.equal(draws.uniforms(3, 7, 11, 2), whole[:11, :2])
    others = torch.stack([whole, draws.uniforms(4, 7, 20, 5), draws.uniforms(3, 8, 20, 5), draws.uniforms(3, -7, 20, 5)])
    assert len(others.unique()) == others.numel()


def test_uniforms_are_uniform_and_draws_follow_their_weights():
    sample = draws.uniforms(0, 1, 1000, 100)
    assert 0 < sample.min() < sample.max() < 1
    assert sample.mean().item() == pytest.approx(0.5, abs=5 * 12**-0.5 / 100_000**0.5)
    chances = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    share = torch.bincount(draws.draw(chances.expand(1000, 6) * 7, sample).flatten(), minlength=6) / 100_000
    assert bool(((share - chances).abs() <= 5 * (chances * (1 - chances) / 100_000).sqrt()).all())


def test_a_large_vocabulary_is_drawn_from_as_its_running_sums_say():
    weights = noise(40, 5000).exp() * (noise(40, 5000, seed=1) > 0)
    weights[:, :1000] = 0  # blocks without weight
    weights[0] = 0
    uniform = draws.uniforms(3, 4, 40, 50)
    running = weights.double().cumsum(-1)
    wanted = torch.searchsorted(running, uniform * running[:, -1:], right=True)
    found = draws.draw(weights, uniform)
    assert torch.equal(found[1:], wanted[1:])
    assert not bool(found[0].any())


@pytest.mark.parametrize("edge", [0.0, 1.0 - 2.0**-53])
def test_no_point_however_close_to_an_edge_draws_an_id_without_weight(edge):
    weights = torch.zeros(1, 1024)
    weights[0, [300, 301, 700]] = torch.tensor([1e-8, 0.1, 1e-8])
    assert draws.draw(weights, torch.tensor([[edge]], dtype=torch.float64)).item() == (300 if edge == 0 else 700)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_of_a_large_vocabulary(dtype):
    logits = noise(30, 64 * 200).to(dtype)  # many of them equal in bfloat16
    logits[:, 7] = -math.inf
    values, ids = largest(logits, 32)
    assert torch.equal(values, logits.topk(32, dim=-1).values)
    assert torch.equal(logits.gather(1, ids), values)
    assert all(len(set(row)) == 32 for row in ids.tolist())
