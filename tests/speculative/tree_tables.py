"""p and q as tables over every short prefix, and every set of children that a node can draw, with its chance."""

from itertools import product

import torch

DOUBLE = torch.float64


class Tables:
    """p(· | prefix) and q(· | prefix) for every prefix of up to ``depth`` tokens; q is over the ids of ``kept``."""

    def __init__(self, size, depth, seed, zeros_p=0, zeros_q=0, kind="random", kept=None):
        self.size, self.depth = size, depth
        self.kept = list(range(size)) if kept is None else kept
        self.vocabulary = None if kept is None else torch.tensor(kept)
        self.generator = torch.Generator().manual_seed(seed)
        self.p, self.q = {}, {}
        for prefix in (prefix for n in range(depth + 1) for prefix in product(range(size), repeat=n)):
            p = self.some(size, zeros_p)
            self.p[prefix] = p
            self.q[prefix] = {
                "random": lambda: self.some(len(self.kept), zeros_q),
                "equal": lambda p=p: p.clone(),
                "disjoint": lambda p=p: (p == 0).to(DOUBLE) / (p == 0).sum(),
                "one-hot": lambda: self.some(size, size - 1),
            }[kind]()

    def some(self, size, zeros):
        weights = torch.rand(size, generator=self.generator, dtype=DOUBLE) ** 3 + 1e-3
        weights[torch.randperm(size, generator=self.generator)[:zeros]] = 0.0
        return weights / weights.sum()

    def wide(self, prefix):
        """q over the target's ids."""
        return torch.zeros(self.size, dtype=DOUBLE).index_copy_(0, torch.tensor(self.kept), self.q[prefix])

    def law(self, prefix=()):
        """The target's law of what continues ``prefix`` to depth + 1 tokens, one axis for each token."""
        p = self.p[prefix]
        if len(prefix) == self.depth:
            return p
        return torch.stack([p[token] * self.law((*prefix, token)) for token in range(self.size)])


def children(q, width, repeats=False):
    """Every tuple of ``width`` children that can be drawn from q, and its chance; without replacement unless ``repeats``."""
    found = {(): 1.0}
    for _ in range(width):
        longer = {}
        for drawn, chance in found.items():
            left = q.clone()
            if not repeats:
                left[list(drawn)] = 0.0
            if left.sum() == 0:  # q ran out: any id
                longer[(*drawn, 0)] = chance
                continue
            for token, part in enumerate((left / left.sum()).tolist()):
                if part > 0:
                    longer[(*drawn, token)] = chance * part
        found = longer
    return torch.tensor(list(found)), torch.tensor(list(found.values()), dtype=DOUBLE)
