"""Optimizers of distillation: AdamW, or Muon for the matrices of the layers with AdamW for all the rest.

Muon is meant for hidden layers, not for embeddings, heads or vectors. Lightning steps one optimizer, so the two are
stepped as one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pipeline.choices import Method
from pipeline.config import Optimizer as OptimizerConfig
from pipeline.muon import Muon


def make(model: nn.Module, config: OptimizerConfig, dtype: torch.dtype) -> Optimizer:
    """The optimizer of all parameters of ``model`` that are trained; ``dtype`` is the fast one for matrix products."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    hidden = {
        id(p) for module in model.modules() if isinstance(module, nn.ModuleList) for p in module.parameters() if p.ndim == 2
    }
    matrices = [p for p in parameters if id(p) in hidden and config.method is Method.muon]
    rest = [p for p in parameters if id(p) not in hidden or config.method is not Method.muon]
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.betas[0], config.betas[1]))
    if not matrices:
        return adamw
    muon = Muon(matrices, config.muon_learning_rate, config.weight_decay, dtype)
    return Together([muon, adamw])


class Together(Optimizer):
    """Several optimizers of disjoint parameters, stepped as one; their parameter groups are shared, not copied."""

    def __init__(self, parts: list[Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]
