"""The law of the committed tokens is the target's, summed over every outcome to 1e-12; planted faults are caught."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative.sampling import draw
from speculative.verification import Verdict
from tests.speculative.bisection import measure
from tests.speculative.chain_tables import CASES, DOUBLE, LAST, law_of, outcomes_of, random, stacked
from tests.speculative.chain_tables import token_rule as verify_sampled


def committed(rule, tables, limit=None, dtype=DOUBLE):
    """Every outcome of a round of the rule, as ``outcomes_of`` gives them."""
    blocks, weights = zip(*tables.blocks(), strict=True)
    count, depth = len(blocks), tables.depth
    p, q = stacked(tables, blocks, dtype)
    drafted, places = torch.tensor(blocks), torch.arange(depth)
    limits = torch.full((count,), depth if limit is None else limit)

    def play(m, row, at_m, follow):
        """Of block ``row`` the first m drafts pass their tests if anything passes, draft m is tested against ``at_m``."""
        accept = torch.where(places < m[:, None], 0.0, torch.where(places == m[:, None], at_m[:, None], LAST))
        follow = follow[:, None].expand(-1, depth + 1)
        return rule(p[row], q[row], drafted[row], accept, follow, tables.vocabulary, limits[row])

    m, row = torch.arange(depth + 1).repeat_interleave(count), torch.arange(count).repeat(depth + 1)
    half, last = torch.full((len(m),), 0.5, dtype=DOUBLE), torch.full((len(m),), LAST, dtype=DOUBLE)
    stays = measure(lambda u: play(m, row, u, half).accepted > m, len(m)).view(depth + 1, count)
    reach = torch.cat([torch.ones(1, count, dtype=DOUBLE), stays[:-1]]).cumprod(0) * torch.tensor(weights, dtype=DOUBLE)
    ends = reach * (1 - stays)
    possible = ends.flatten() > 1e-15
    assert (play(m, row, last, half).accepted[possible] == m[possible]).all()
    return outcomes_of(tables, blocks, ends, lambda m, row, u: play(m, row, torch.full_like(u, LAST), u).following)


def error(rule, tables, **options):
    law = law_of(committed(rule, tables, **options), tables)
    assert abs(law.sum().item() - 1) < 1e-5
    return (law - tables.law()).abs().max().item()


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
