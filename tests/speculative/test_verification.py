"""The law of the committed tokens is the target's, summed over every outcome to 1e-12; planted faults are caught.

A round is enumerated, not sampled: every drafted block with its probability under q, every number of kept drafts, every
token that follows. What a rule does is read off the rule itself: acceptance and the following draw are steps in their
uniform numbers, so bisection finds the length of the interval on which each outcome happens.
"""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative import verification
from speculative.sampling import draw
from speculative.verification import Guess, Rule, Verdict, verify_choices

LAST = 1 - 2.0**-53
DOUBLE = torch.float64


def verify_sampled(p, q, drafted, accept, follow, vocabulary=None, limits=None, rule=Rule.TOKEN, certain=None):
    """The rule as a function of plain tensors."""
    limits = torch.full((len(p),), drafted.shape[1]) if limits is None else limits
    return verification.verify_sampled(p, Guess(drafted, q, vocabulary, certain), accept, follow, limits, rule)


def verify_greedy(choices, drafted, limits=None):
    limits = torch.full((len(choices),), drafted.shape[1]) if limits is None else limits
    return verify_choices(choices, drafted, limits)


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


def measure(holds, count):
    """For each of ``count`` rows, the length of the interval of uniforms, from 0 upwards, on which ``holds``."""
    low, high = torch.zeros(count, dtype=DOUBLE), torch.ones(count, dtype=DOUBLE)
    for _ in range(53):
        middle = (low + high) / 2
        yes = holds(middle)
        low, high = torch.where(yes, middle, low), torch.where(yes, high, middle)
    return torch.where(low >= LAST, 1.0, low)


def committed_law(rule, tables, limit=None, dtype=DOUBLE):
    """The law of K + 1 tokens: what the rule commits in one round, continued by draws from the target."""
    law = torch.zeros((tables.size,) * (tables.depth + 1), dtype=DOUBLE)
    for block, m, token, weight in committed(rule, tables, limit, dtype):
        law[(*block[:m], token)] += weight * tables.law((*block[:m], token))
    return law


def committed(rule, tables, limit=None, dtype=DOUBLE):
    """Every outcome of a round: the drafted block, how many of its tokens stay, the token after them, and its probability."""
    blocks, weights = zip(*tables.blocks(), strict=True)
    count, depth, size = len(blocks), tables.depth, tables.size
    p, q = stacked(tables, blocks, dtype)
    limits = None if limit is None else torch.full((count,), limit)

    def play(m, at_m, follow):
        """The first m drafts pass their tests if anything passes, draft m is tested against ``at_m``."""
        accept = torch.full((count, depth), LAST, dtype=DOUBLE)
        accept[:, :m] = 0.0
        accept[:, m : m + 1] = at_m[:, None]
        follow = follow[:, None].expand(-1, depth + 1)
        return rule(p, q, torch.tensor(blocks), accept, follow, tables.vocabulary, limits)

    half, last = torch.full((count,), 0.5, dtype=DOUBLE), torch.full((count,), LAST, dtype=DOUBLE)
    alive = torch.tensor(weights, dtype=DOUBLE)
    for m in range(depth + 1):
        stays = half * 0
        if m < depth:
            stays = measure(lambda u, m=m: play(m, u, half).accepted > m, count)
        ends, alive = alive * (1 - stays), alive * stays
        possible = ends > 1e-15
        assert (play(m, last, half).accepted[possible] == m).all()
        below = half * 0
        for token in range(size):
            upto = measure(lambda u, m=m, token=token: play(m, last, u).following <= token, count)
            for row in possible.nonzero().flatten().tolist():
                yield blocks[row], m, token, float(ends[row] * (upto[row] - below[row]))
            below = upto


def error(rule, tables, **options):
    law = committed_law(rule, tables, **options)
    assert abs(law.sum().item() - 1) < 1e-5
    return (law - tables.law()).abs().max().item()


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


@pytest.mark.parametrize("case", CASES)
def test_the_law_is_the_target_s(case):
    if case == "no drafts":
        p = CASES[case].p[()][None, None]
        points = (torch.arange(1000, dtype=DOUBLE) + 0.5) / 1000
        none, ids = torch.zeros(1, 0), torch.zeros(1, 0).long()
        drawn = [verify_sampled(p, p[:, :0], ids, none, u.view(1, 1)) for u in points]
        assert all(verdict.accepted.item() == 0 for verdict in drawn)
        counts = torch.bincount(torch.cat([verdict.following for verdict in drawn]), minlength=5)
        assert (counts / 1000 - p[0, 0]).abs().max() <= 1e-3
    else:
        assert error(verify_sampled, CASES[case]) < 1e-12


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
@pytest.mark.parametrize("case", ["random 5 by 3", "trimmed", "one-hot draft", "equal"])
def test_a_limit_keeps_the_law(case, limit):
    assert error(verify_sampled, CASES[case], limit=limit) < 1e-12


def test_float32_keeps_the_law_to_its_rounding():
    assert error(verify_sampled, CASES["random 4 by 2"], dtype=torch.float32) < 1e-6


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**31), st.integers(3, 4), st.integers(1, 2), st.integers(0, 2), st.integers(0, 2))
def test_the_law_is_the_target_s_for_any_tables(seed, size, depth, zeros_p, zeros_q):
    assert error(verify_sampled, random(size, depth, seed, zeros_p, zeros_q)) < 1e-12


def rule(ratio=lambda p, q: p / q, p_row=0, q_row=0, next_row=0, subtract=True, temper=None):
    """Rejection sampling with one seam for every fault; without arguments it is right."""

    def verify(p, q, drafted, accept, follow, vocabulary=None, limits=None):
        row, depth = torch.arange(len(drafted)), drafted.shape[1]
        if vocabulary is not None:
            q = torch.zeros_like(p[:, :-1]).index_copy_(-1, vocabulary, q)
        if temper is not None:
            q = q**temper / (q**temper).sum(-1, keepdim=True)
        shifted_p, shifted_q = p.roll(-p_row, 1)[:, :depth], q.roll(-q_row, 1)
        token = drafted[..., None]
        kept = accept < ratio(shifted_p.gather(2, token), shifted_q.gather(2, token)).squeeze(-1)
        accepted = kept.long().cumprod(-1).sum(-1)
        p_next = p.roll(-next_row, 1)[row, accepted]
        q_next = torch.cat([q.roll(-next_row, 1), torch.zeros_like(q[:, :1])], 1)[row, accepted]
        residual = (p_next - q_next).clamp(min=0.0) if subtract else p_next
        weights = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_next)
        return Verdict(accepted, draw(weights, follow[row, accepted]))

    return verify


def residual_of_the_first_row(p, q, drafted, accept, follow, vocabulary=None, limits=None):
    verdict = verify_sampled(p, q, drafted, accept, follow, vocabulary, limits)
    rejected = verdict.accepted < drafted.shape[1]
    residual = (p[:, 0] - q[:, 0]).clamp(min=0.0)
    return Verdict(verdict.accepted, torch.where(rejected, draw(residual, follow[:, 0]), verdict.following))


def bonus_of_the_row_before(p, q, drafted, accept, follow, vocabulary=None, limits=None):
    verdict = verify_sampled(p, q, drafted, accept, follow, vocabulary, limits)
    full = verdict.accepted == drafted.shape[1]
    return Verdict(verdict.accepted, torch.where(full, draw(p[:, -2], follow[:, -1]), verdict.following))


def plain_draw_after_the_drafts(p, q, drafted, accept, follow, vocabulary=None, limits=None):
    """The limit forgotten in the residual: a row at its limit has rejected nothing, yet q is subtracted."""
    row = torch.arange(len(drafted))
    verdict = verify_sampled(p, q, drafted, accept, follow, vocabulary, limits)
    at_limit = (verdict.accepted == limits) & (limits < drafted.shape[1])
    place = verdict.accepted.clamp(max=drafted.shape[1] - 1)
    residual = (p[row, place] - q[row, place]).clamp(min=0.0)
    return Verdict(verdict.accepted, torch.where(at_limit, draw(residual, follow[row, place]), verdict.following))


FAULTS = {
    "no residual": rule(subtract=False),
    "residual and bonus of the next position": rule(next_row=1),
    "residual of the first position": residual_of_the_first_row,
    "ratio upside down": rule(ratio=lambda p, q: q / p),
    "accept always": rule(ratio=lambda p, q: torch.ones_like(p)),
    "accept never": rule(ratio=lambda p, q: torch.zeros_like(p)),
    "accept with p alone": rule(ratio=lambda p, q: p),
    "accept whenever p exceeds half of q": rule(ratio=lambda p, q: (p > q / 2).to(p.dtype)),
    "draft temperature in the ratio and not in the draw": rule(temper=0.5),
    "p one position late": rule(p_row=1),
    "q one position late": rule(q_row=1),
    "bonus of the position before": bonus_of_the_row_before,
}


def test_the_seamed_rule_is_right_without_a_fault():
    for case in ("random 4 by 2", "random 5 by 3", "trimmed"):
        assert error(rule(), CASES[case]) < 1e-12


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_breaks_the_law(fault):
    assert error(FAULTS[fault], CASES["random 5 by 3"]) > 1e-3


def test_a_residual_at_the_limit_breaks_the_law():
    assert error(plain_draw_after_the_drafts, CASES["random 5 by 3"], limit=1) > 1e-3


def test_drafts_behind_the_limit_are_not_looked_at():
    p, q, drafted, accept, follow = scene(64, 3, 5)
    limits = torch.arange(64) % 4
    cut = verify_sampled(p, q, drafted, accept, follow, limits=limits)
    for row, limit in enumerate(limits.tolist()):
        one = slice(row, row + 1)
        alone = verify_sampled(
            p[one, : limit + 1], q[one, :limit], drafted[one, :limit], accept[one, :limit], follow[one, : limit + 1]
        )
        assert (cut.accepted[row], cut.following[row]) == (alone.accepted[0], alone.following[0])


def scene(rows, depth, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(rows, depth + 1, size, generator=generator, dtype=DOUBLE).pow(3)
    q = torch.rand(rows, depth, size, generator=generator, dtype=DOUBLE).pow(3)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    drafted = draw(q, torch.rand(rows, depth, generator=generator, dtype=DOUBLE))
    accept, follow = torch.rand(2, rows, depth + 1, generator=generator, dtype=DOUBLE)
    return p, q, drafted, accept[:, :-1], follow


def test_a_draft_stays_as_often_as_the_distributions_overlap():
    p, q, _, _, _ = scene(1, 1, 5)
    points = (torch.arange(20_000, dtype=DOUBLE) + 0.5) / 20_000
    kept = 0.0
    for token in range(5):
        drafted = torch.full((len(points), 1), token)
        wide = [tensor.expand(len(points), -1, -1) for tensor in (p, q)]
        accepted = verify_sampled(*wide, drafted, points[:, None], points[:, None].expand(-1, 2)).accepted
        kept += q[0, 0, token] * accepted.double().mean()
    assert abs(kept - torch.minimum(p[0, 0], q[0, 0]).sum()) < 1e-4


def test_the_inputs_are_left_as_they_were():
    inputs = scene(16, 3, 5)
    before = [tensor.clone() for tensor in inputs]
    verify_sampled(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


def test_a_trimmed_draft_decides_as_its_widened_distribution_does():
    p, _, _, accept, follow = scene(200, 3, 7)
    _, q, drafted, _, _ = scene(200, 3, 4, seed=1)
    vocabulary = torch.tensor([0, 2, 5, 6])
    wide = torch.zeros(200, 3, 7, dtype=DOUBLE).index_copy_(-1, vocabulary, q)
    one = verify_sampled(p, q, vocabulary[drafted], accept, follow, vocabulary)
    other = verify_sampled(p, wide, vocabulary[drafted], accept, follow)
    assert torch.equal(one.accepted, other.accepted)
    assert torch.equal(one.following, other.following)
    assert set(one.accepted.tolist()) == {0, 1, 2, 3}


@settings(deadline=None)
@given(
    st.integers(0, 5).flatmap(
        lambda k: st.tuples(
            st.lists(st.integers(0, 2), min_size=k + 1, max_size=k + 1),
            st.lists(st.integers(0, 2), min_size=k, max_size=k),
        )
    )
)
def test_greedy_keeps_the_agreeing_prefix(block):
    choices, drafted = block
    m = 0
    while m < len(drafted) and drafted[m] == choices[m]:
        m += 1
    verdict = verify_greedy(torch.tensor([choices]), torch.tensor([drafted], dtype=torch.long).view(1, -1))
    assert (verdict.accepted.item(), verdict.following.item()) == (m, choices[m])


def test_greedy_treats_rows_apart():
    choices = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    verdict = verify_greedy(choices, torch.tensor([[1, 2], [1, 0], [0, 2]]))
    assert verdict.accepted.tolist() == [2, 1, 0]
    assert verdict.following.tolist() == [3, 2, 1]
