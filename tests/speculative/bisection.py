"""What a rule does, read off the rule: it is a step function of each uniform number, and bisection finds the steps."""

import torch


def measure(holds, count, steps=53):
    """For each of ``count`` rows, the length of the interval of uniforms, from 0 upwards, on which ``holds``."""
    low, high = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
    for _ in range(steps):
        middle = (low + high) / 2
        yes = holds(middle)
        low, high = torch.where(yes, middle, low), torch.where(yes, high, middle)
    return torch.where(low >= 1 - 2.0**-steps, 1.0, low)
