"""p and q as tables over every short prefix, and the law of what a rule commits of chains that are drafted from them.

A round is enumerated, not sampled: every drafted block with its probability under q, every number of kept drafts, every
token that follows. What a rule does is read off the rule itself: acceptance and the following draw are steps in their
uniform numbers, so bisection finds the length of the interval on which each outcome happens.
"""

from collections import defaultdict
from itertools import product

import torch

from speculative import verification
from speculative.sampling import draw
from speculative.verification import Guess, Rule
from tests.speculative.bisection import measure

LAST = 1 - 2.0**-53
DOUBLE = torch.float64


def token_rule(p, q, drafted, accept, follow, vocabulary=None, limits=None):
    """Rejection sampling as a function of plain tensors."""
    limits = torch.full((len(p),), drafted.shape[1]) if limits is None else limits
    return verification.verify_sampled(p, Guess(drafted, q, vocabulary), accept, follow, limits, Rule.TOKEN)


class Tables:
    """p(· | prefix) and q(· | prefix) for every prefix of up to K tokens; q is over the ids of ``vocabulary``."""

    def __init__(self, size, depth, make_p, make_q, vocabulary=None):
        self.size, self.depth = size, depth
        self.ids = list(range(size)) if vocabulary is None else vocabulary
        self.vocabulary = None if vocabulary is None else torch.tensor(vocabulary)
        prefixes = [prefix for length in range(depth + 1) for prefix in product(range(size), repeat=length)]
        self.p = {prefix: make_p() for prefix in prefixes}
        self.q = {prefix: make_q(self.p[prefix]) for prefix in prefixes}
        self.laws = {}

    def blocks(self):
        """Every block that the draft can propose, with its probability."""
        for block in product(self.ids, repeat=self.depth):
            weight = 1.0
            for place, token in enumerate(block):
                weight *= self.q[block[:place]][self.ids.index(token)].item()
            if weight > 0:
                yield block, weight

    def law(self, prefix=()):
        """The target's law of what continues ``prefix`` to K + 1 tokens, one axis for each token."""
        if len(prefix) > self.depth:
            return torch.tensor(1.0, dtype=DOUBLE)
        if prefix not in self.laws:
            p = self.p[prefix]
            self.laws[prefix] = torch.stack([p[token] * self.law((*prefix, token)) for token in range(self.size)])
        return self.laws[prefix]


def stacked(tables, blocks, dtype=DOUBLE):
    """p (blocks, K+1, V) and q (blocks, K, D) along each of the drafted ``blocks``."""
    p = [torch.stack([tables.p[block[:j]] for j in range(tables.depth + 1)]) for block in blocks]
    q = [torch.stack([tables.q[block[:j]] for j in range(tables.depth)]) for block in blocks]
    return torch.stack(p).to(dtype), torch.stack(q).to(dtype)


def outcomes_of(tables, blocks, ends, follow):
    """Every outcome of a round: the drafted block, how many of its tokens stay, the token after them, and its probability.

    Args:
        ends: (K + 1, blocks), the probability that a block is drafted and its first m drafts stay.
        follow: the tokens that follow, for a tensor of m, one of blocks and one of uniforms.
    """
    places = (ends > 1e-15).nonzero()
    tokens = torch.arange(tables.size).repeat(len(places))
    m, row = places.repeat_interleave(tables.size, 0).T
    upto = measure(lambda u: follow(m, row, u) <= tokens, len(tokens)).view(len(places), tables.size)
    parts = upto.diff(dim=1, prepend=torch.zeros(len(places), 1, dtype=DOUBLE)) * ends[tuple(places.T)][:, None]
    return [
        (blocks[block], kept, token, weight)
        for (kept, block), weights in zip(places.tolist(), parts.tolist(), strict=True)
        for token, weight in enumerate(weights)
    ]


def law_of(outcomes, tables):
    """The law of K + 1 tokens: outcomes of one round, each continued by draws from the target."""
    starts = defaultdict(float)
    for block, kept, token, weight in outcomes:
        starts[(*block[:kept], token)] += weight
    law = torch.zeros((tables.size,) * (tables.depth + 1), dtype=DOUBLE)
    for start, weight in starts.items():
        law[start] += weight * tables.law(start)
    return law


class Maker:
    """Random distributions of one generator; each call is another one."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def some(self, size, zeros=0):
        weights = torch.rand(size, generator=self.generator, dtype=DOUBLE) ** 3 + 1e-3
        weights[torch.randperm(size, generator=self.generator)[:zeros]] = 0.0
        return weights / weights.sum()


def random(size, depth, seed, zeros_p=0, zeros_q=0):
    make = Maker(seed)
    return Tables(size, depth, lambda: make.some(size, zeros_p), lambda p: make.some(size, zeros_q))


def equal(size, depth, seed):
    make = Maker(seed)
    return Tables(size, depth, lambda: make.some(size), lambda p: p.clone())


def disjoint(size, depth, seed):
    """q lives where p is zero: no draft can stay."""
    make = Maker(seed)
    return Tables(size, depth, lambda: make.some(size, size - 2), lambda p: (p == 0).to(DOUBLE) / (size - 2))


def one_hot(size, depth, seed):
    make = Maker(seed)

    def certain(p):
        return torch.eye(size, dtype=DOUBLE)[torch.randint(size, (), generator=make.generator)]

    return Tables(size, depth, lambda: make.some(size), certain)


def certain_target(size, depth, seed):
    make = Maker(seed)
    return Tables(size, depth, lambda: make.some(size, size - 1), lambda p: make.some(size))


def trimmed(size, depth, seed, vocabulary, zeros_p=0):
    make = Maker(seed)
    return Tables(size, depth, lambda: make.some(size, zeros_p), lambda p: make.some(len(vocabulary)), vocabulary)


CASES = {
    "random 3 by 1": random(3, 1, 0),
    "random 4 by 2": random(4, 2, 1),
    "random 5 by 3": random(5, 3, 2),
    "zeros in p": random(4, 3, 3, zeros_p=2),
    "zeros in q": random(4, 3, 4, zeros_q=2),
    "zeros in both": random(5, 2, 5, zeros_p=2, zeros_q=3),
    "equal": equal(4, 3, 6),
    "disjoint": disjoint(5, 2, 7),
    "one-hot draft": one_hot(4, 3, 8),
    "one-hot target": certain_target(4, 2, 9),
    "trimmed": trimmed(5, 3, 10, [0, 2, 3]),
    "trimmed to one": trimmed(4, 3, 11, [2]),
    "trimmed, zeros in p": trimmed(5, 2, 12, [1, 2, 4], zeros_p=3),
    "no drafts": random(5, 0, 13),
}


def scene(rows, depth, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(rows, depth + 1, size, generator=generator, dtype=DOUBLE).pow(3)
    q = torch.rand(rows, depth, size, generator=generator, dtype=DOUBLE).pow(3)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    drafted = draw(q, torch.rand(rows, depth, generator=generator, dtype=DOUBLE))
    accept, follow = torch.rand(2, rows, depth + 1, generator=generator, dtype=DOUBLE)
    return p, q, drafted, accept[:, :-1], follow
