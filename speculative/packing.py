"""Weights of linear layers, laid out once for the processor: what makes verifying a few tokens cost one.

A plain float32 product of a few rows with a large matrix takes a path that is made for many rows, and costs up to twice
what one row does; in bfloat16 one row already takes a third longer than it has to. oneDNN's packed layout reads the weights
once, whatever the rows. It knows nothing of decoding.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def pack(model: PreTrainedModel) -> PreTrainedModel:
    """Give the linear layers of ``model`` a packed copy of their weights, for inference; returns ``model`` itself.

    Takes effect in float32 on x86 processors, in bfloat16 where oneDNN has it there, and leaves all else alone. The weights
    stay where they are, so the layers need twice the memory; a layer whose weights are changed afterwards, moved or trained,
    goes back to its plain product.
    """
    if torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        for module in model.modules():
            if type(module) in (nn.Linear, _Packed) and _fits(module.weight):
                module.__class__ = _Packed
                module.packed = _Layout(module.weight)
    return model


def _fits(weight: Tensor) -> bool:
    if weight.device.type != "cpu":
        return False
    low = weight.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return low or weight.dtype is torch.float32


class _Layout:
    """The packed copy, and which state of the weights it is of."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.of = state_of(weight)
        with torch.no_grad():
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def __deepcopy__(self, memo: dict) -> None:
        return None  # a copy of the layer has weights of its own


def state_of(weight: Tensor) -> tuple[int, int, torch.dtype]:
    """What changes when ``weight`` is changed in place, moved or replaced."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version, weight.dtype


class _Packed(nn.Linear):
    """A linear layer with a packed copy of its weight."""

    packed: _Layout | None

    def forward(self, input: Tensor) -> Tensor:
        layout = self.packed
        if torch.compiler.is_compiling() or layout is None or torch.is_grad_enabled() or layout.of != state_of(self.weight):
            return super().forward(input)
        return torch.ops.mkldnn._linear_pointwise(input, layout.weight, self.bias, "none", [], "")
