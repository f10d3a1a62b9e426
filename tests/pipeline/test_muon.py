"""Muon equals torch's where torch's arithmetic is ours, and its update has the singular vectors of what it was given."""

import pytest
import torch
from torch import nn

from pipeline.muon import Muon, orthogonal

SHAPES = [(6, 6), (4, 9), (9, 4)]


def gradients(shape: tuple[int, int], steps: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for _ in range(steps)]


def stepped(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> torch.Tensor:
    for gradient in gradients(tuple(parameter.shape)):
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_equal_torchs_once_torch_multiplies_in_the_same_format(shape, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    a, b = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours = stepped(Muon([a], 0.02, 0.1, torch.float64), a)
    theirs = stepped(torch.optim.Muon([b], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), b)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_low_format_changes_an_update_little(dtype):
    [matrix] = gradients((12, 30), 1)
    exact = orthogonal(matrix.double(), torch.float64)
    found = orthogonal(matrix, dtype)
    assert found.dtype is dtype
    assert (found.double() - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_vectors_stay_and_singular_values_come_near_one(shape):
    u, _, vh = torch.linalg.svd(gradients(shape, 1)[0].double(), full_matrices=False)
    matrix = u @ torch.diag(torch.linspace(0.3, 2.0, min(shape)).double()) @ vh
    found = orthogonal(matrix, torch.float64)
    inside = u.T @ found @ vh.T
    torch.testing.assert_close(inside, torch.diag(inside.diagonal()), atol=1e-9, rtol=0)
    assert inside.diagonal().min() > 0.65
    assert inside.diagonal().max() < 1.25


def test_a_gradient_of_zero_moves_nothing_but_the_decay():
    parameter = nn.Parameter(torch.ones(3, 3))
    parameter.grad = torch.zeros(3, 3)
    Muon([parameter], 0.5, 0.1, torch.float32).step()
    torch.testing.assert_close(parameter.detach(), torch.full((3, 3), 0.95))


def test_a_parameter_without_gradient_is_left_alone():
    parameter = nn.Parameter(torch.ones(3, 3))
    Muon([parameter], 0.5, 0.1, torch.float32).step()
    assert torch.equal(parameter.detach(), torch.ones(3, 3))
