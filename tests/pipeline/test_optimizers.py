"""Two optimizers stepped as one: which parameter goes where, and that a restored state continues to the same bits."""

import copy

import torch
from torch import nn

from pipeline import optimizers
from pipeline.choices import Method
from pipeline.config import Optimizer as OptimizerConfig


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.head = nn.Linear(6, 9, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def train(model, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 6, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()


def small():
    torch.manual_seed(0)
    return Small()


def test_matrices_of_layers_go_to_muon_and_the_rest_to_adamw():
    model = small()
    together = optimizers.make(model, OptimizerConfig(method=Method.muon), torch.float32)
    muon, adamw = together.parts
    assert {id(p) for g in muon.param_groups for p in g["params"]} == {id(layer.weight) for layer in model.layers}
    assert {id(p) for g in adamw.param_groups for p in g["params"]} == {
        id(model.head.weight),
        *(id(layer.bias) for layer in model.layers),
    }


def test_adamw_takes_everything():
    model = small()
    optimizer = optimizers.make(model, OptimizerConfig(method=Method.adamw), torch.float32)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}


def test_frozen_parameters_are_left_alone():
    model = small()
    model.head.weight.requires_grad_(False)
    together = optimizers.make(model, OptimizerConfig(), torch.float32)
    assert id(model.head.weight) not in {id(p) for g in together.param_groups for p in g["params"]}


def test_restored_state_continues_to_the_same_bits():
    whole = small()
    train(whole, optimizers.make(whole, OptimizerConfig(), torch.float32), 3, seed=1)

    first = small()
    optimizer = optimizers.make(first, OptimizerConfig(), torch.float32)
    train(first, optimizer, 1, seed=1)
    second = copy.deepcopy(first)
    resumed = optimizers.make(second, OptimizerConfig(), torch.float32)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    generator = torch.Generator().manual_seed(1)
    torch.randn(4, 6, generator=generator)
    for model, stepped in ((first, optimizer), (second, resumed)):
        state = generator.get_state()
        for _ in range(2):
            stepped.zero_grad()
            model(torch.randn(4, 6, generator=generator)).square().mean().backward()
            stepped.step()
        generator.set_state(state)
    for a, b, c in zip(whole.parameters(), first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(b, c)


def test_a_schedule_reaches_both_after_a_restore():
    model = small()
    together = optimizers.make(model, OptimizerConfig(learning_rate=1.0, muon_learning_rate=2.0), torch.float32)
    together.load_state_dict(together.state_dict())
    schedule = torch.optim.lr_scheduler.LambdaLR(together, lambda step: 0.5)
    assert [part.param_groups[0]["lr"] for part in together.parts] == [1.0, 0.5]
    assert schedule.get_last_lr()[:2] == [1.0, 0.5]
