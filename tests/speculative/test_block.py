"""Block verification has the target's law too, and keeps at least as many drafts; named tokens are one-hot drafts.

Every prefix of a block has a test of its own, and the longest that passes stays; so each test is switched on alone, its
chance is measured by bisection, and the outcomes are put together from the independent chances.
"""

import pytest
import torch

from speculative.sampling import draw
from speculative.verification import Guess, Rule, Verdict, _block, verify_sampled
from tests.speculative.bisection import measure
from tests.speculative.chain_tables import CASES, DOUBLE, LAST, law_of, outcomes_of, scene, stacked

FAIL = 1.0  # no chance exceeds it


def block_rule(p, guess, accept, follow, limits):
    return verify_sampled(p, guess, accept, follow, limits, Rule.BLOCK)


def outcomes(rule, tables, limit=None):
    """Law of K + 1 tokens (one round, continued by the target) and the expected number of kept drafts."""
    found = committed_blocks(rule, tables, limit)
    return law_of(found, tables), sum(kept * weight for _, kept, _, weight in found)


def committed_blocks(rule, tables, limit=None):
    """Every outcome of a round of the rule, as ``outcomes_of`` gives them."""
    blocks, weights = zip(*tables.blocks(), strict=True)
    count, depth = len(blocks), tables.depth
    p, q = stacked(tables, blocks)
    drafted, places = torch.tensor(blocks), torch.arange(depth)
    limits = torch.full((count,), depth if limit is None else limit)

    def play(m, row, at_m, follow):
        """Of block ``row`` only the test of the prefix of m drafts may pass, at the uniforms ``at_m``."""
        accept = torch.where(places == m[:, None] - 1, at_m[:, None], FAIL)
        guess = Guess(drafted[row], q[row], tables.vocabulary)
        return rule(p[row], guess, accept, follow[:, None].expand(-1, depth + 1), limits[row])

    m, row = torch.arange(depth + 1).repeat_interleave(count), torch.arange(count).repeat(depth + 1)
    half, last = torch.full((len(m),), 0.5, dtype=DOUBLE), torch.full((len(m),), LAST, dtype=DOUBLE)
    always = torch.ones(1, count, dtype=DOUBLE)
    some = slice(count, None)  # no draft at all stays whenever no other number does
    passes = measure(lambda u: play(m[some], row[some], u, half[some]).accepted == m[some], depth * count).view(depth, count)
    longer_failed = torch.cat([1 - passes, always]).flip(0).cumprod(0).flip(0)
    ends = torch.cat([always, passes]) * longer_failed * torch.tensor(weights, dtype=DOUBLE)
    possible = ends.flatten() > 1e-15
    assert (play(m, row, half * 0, last).accepted[possible] == m[possible]).all()
    return outcomes_of(tables, blocks, ends, lambda m, row, u: play(m, row, torch.zeros_like(u), u).following)


def token_kept(tables):
    """Expected number of drafts that the token rule keeps: Σ over blocks of Π min(1, p / q)."""
    total = 0.0
    for block, weight in tables.blocks():
        alive = weight
        for place, token in enumerate(block):
            p, q = tables.p[block[:place]][token], tables.q[block[:place]][tables.ids.index(token)]
            alive *= min(1.0, float(p / q))
            total += alive
    return total


DRAFTED = [case for case in CASES if case != "no drafts"]


@pytest.mark.parametrize("case", DRAFTED)
def test_the_law_is_the_target_s(case):
    law, kept = outcomes(block_rule, CASES[case])
    assert abs(law.sum().item() - 1) < 1e-12
    assert (law - CASES[case].law()).abs().max() < 1e-12
    assert kept >= token_kept(CASES[case]) - 1e-12


def test_it_keeps_more_where_there_is_more_than_one_draft():
    gains = [outcomes(block_rule, CASES[case])[1] - token_kept(CASES[case]) for case in ("random 4 by 2", "random 5 by 3")]
    assert min(gains) > 1e-3
    assert abs(outcomes(block_rule, CASES["random 3 by 1"])[1] - token_kept(CASES["random 3 by 1"])) < 1e-12


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
@pytest.mark.parametrize("case", ["random 5 by 3", "trimmed", "equal"])
def test_a_limit_keeps_the_law(case, limit):
    law, _ = outcomes(block_rule, CASES[case], limit=limit)
    assert (law - CASES[case].law()).abs().max() < 1e-12


def test_block_and_token_are_one_rule_for_one_draft():
    p, q, drafted, accept, follow = scene(500, 1, 5)
    limits = torch.ones(500, dtype=torch.long)
    one, other = (verify_sampled(p, Guess(drafted, q), accept, follow, limits, rule) for rule in (Rule.TOKEN, Rule.BLOCK))
    assert torch.equal(one.accepted, other.accepted)
    assert torch.equal(one.following, other.following)


def broken(residual_weight=True, last_test="weight", forget=False):
    """Block verification with a seam for every fault; without arguments it is right."""

    def rule(p, guess, accept, follow, limits):
        row, depth = torch.arange(len(p)), guess.tokens.shape[1]
        ratio = p[:, :-1].gather(2, guess.tokens[..., None]).squeeze(-1) / guess.at_tokens()
        accepted, weight = _block(p, guess, ratio.sqrt() if forget else ratio, accept, limits)
        if last_test == "always":
            accepted = torch.where(accept[:, -1] < 0.9, depth, accepted)
        p_next = p[row, accepted]
        scaled = weight[row, accepted, None] * p_next if residual_weight else p_next
        residual = guess.excess(scaled, accepted.clamp(max=depth - 1))
        whole = (accepted >= limits)[:, None] | (residual.sum(-1, keepdim=True) <= 0)
        return Verdict(accepted, draw(torch.where(whole, p_next, residual), follow[row, accepted]))

    return rule


@pytest.mark.parametrize(
    ("fault", "breaks"),
    [({}, False), ({"residual_weight": False}, True), ({"last_test": "always"}, True), ({"forget": True}, True)],
)
def test_a_planted_fault_breaks_the_law(fault, breaks):
    law, _ = outcomes(broken(**fault), CASES["random 5 by 3"])
    error = (law - CASES["random 5 by 3"].law()).abs().max().item()
    assert error > 1e-3 if breaks else error < 1e-12


# Tokens that were named and not drawn


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_a_named_token_is_a_one_hot_draft(rule):
    p, _, drafted, accept, follow = scene(400, 3, 5)
    limits = torch.arange(400) % 4
    hot = torch.nn.functional.one_hot(drafted, 5).double()
    one = verify_sampled(p, Guess(drafted, hot), accept, follow, limits, rule)
    other = verify_sampled(p, Guess(drafted, None), accept, follow, limits, rule)
    assert torch.equal(one.accepted, other.accepted)
    assert torch.equal(one.following, other.following)
    assert {0, 1, 2} <= set(one.accepted.tolist())


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_rows_with_and_without_a_distribution_stand_side_by_side(rule):
    """Named tokens may lie outside the draft's vocabulary; its distribution is then not asked."""
    p, _, named, accept, follow = scene(400, 3, 7)
    _, q, drawn, _, _ = scene(400, 3, 4, seed=1)
    vocabulary = torch.tensor([0, 2, 5, 6])
    certain = torch.arange(400) % 2 == 0
    tokens = torch.where(certain[:, None], named, vocabulary[drawn])
    limits = torch.full((400,), 3)
    mixed = verify_sampled(p, Guess(tokens, q, vocabulary, certain), accept, follow, limits, rule)
    wide = torch.zeros(400, 3, 7, dtype=DOUBLE).index_copy_(-1, vocabulary, q)
    wide = torch.where(certain[:, None, None], torch.nn.functional.one_hot(tokens, 7).double(), wide)
    whole = verify_sampled(p, Guess(tokens, wide), accept, follow, limits, rule)
    assert torch.equal(mixed.accepted, whole.accepted)
    assert torch.equal(mixed.following, whole.following)


def test_match_keeps_drafts_that_the_target_draws_too():
    p, q, drafted, accept, follow = scene(300, 2, 4)
    limits = torch.full((300,), 2)
    verdict = verify_sampled(p, Guess(drafted, q), accept, follow, limits, Rule.MATCH)
    choices = draw(p, follow)
    agree = choices[:, :2] == drafted
    assert torch.equal(verdict.accepted, agree[:, 0].long() + (agree[:, 0] & agree[:, 1]).long())
    assert torch.equal(verdict.following, choices[torch.arange(300), verdict.accepted])
