"""Processes that train one draft together: how much of a batch is whose, and what all of them must know alike.

Each takes its rows of a batch and the mean over their positions; the gradients of all are averaged (DistributedDataParallel).
For that to be the gradient of the mean over all positions, a process's loss counts as its positions do. One process alone
is the same with nothing to do.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def together() -> bool:
    return dist.is_available() and dist.is_initialized()


def portion(weight: Tensor) -> Tensor:
    """n·w / Σw of n processes, this one's positions weighing w () in all: what its mean is multiplied by."""
    if not together():
        return torch.ones_like(weight)
    total = weight.clone()
    dist.all_reduce(total)
    return weight * dist.get_world_size() / total


def mean(value: Tensor) -> Tensor:
    """The mean of ``value`` () over the processes, without gradient."""
    found = value.detach().clone()
    if together():
        dist.all_reduce(found)
        found /= dist.get_world_size()
    return found
