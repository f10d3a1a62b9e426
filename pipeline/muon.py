"""Muon: momentum, orthogonalised by Newton–Schulz, for the matrices of hidden layers (Jordan et al., 2024).

torch.optim.Muon multiplies in bfloat16 whatever the machine; on a processor without bfloat16 instructions that made one
step of a two-layer draft take half a minute. Here the number format is the caller's. All else is equal to torch's, which
the tests hold it to, with the learning rate scaled so that updates have AdamW's size (Liu et al., 2502.16982).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
MOMENTUM = 0.95


class Muon(Optimizer):
    """Steps matrices; ``dtype`` is the format in which the iteration multiplies."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, weight_decay: float, dtype: torch.dtype) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group["lr"], group["weight_decay"])
        return loss

    def _step(self, parameter: nn.Parameter, gradient: Tensor, rate: float, decay: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        momentum = state["momentum"].lerp_(gradient, 1 - MOMENTUM)
        update = orthogonal(gradient.lerp(momentum, MOMENTUM), self.dtype)  # Nesterov
        parameter.mul_(1 - rate * decay)
        parameter.add_(update, alpha=-rate * 0.2 * max(parameter.shape) ** 0.5)


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix with the singular vectors of ``matrix`` and singular values near 1 (0.7 to 1.2), in ``dtype``."""
    a, b, c = COEFFICIENTS
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = wide.to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if wide is not matrix else x
