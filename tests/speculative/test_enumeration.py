"""The law to 1e-12 where more than the rule has a say: real filters on both sides, an EOS inside a block, and ``match``.

Tables, intervals of uniforms and planted faults are those of the tests of the rules.
"""

from collections import defaultdict
from functools import cache

import pytest
import torch

from speculative.rows import Rows
from speculative.sampling import Sampling, probabilities
from speculative.verification import Guess, Rule, Verdict, verify_choices
from speculative.verification import verify_sampled as judge
from tests.speculative.bisection import measure
from tests.speculative.chain_tables import CASES, DOUBLE, Tables, law_of, random, stacked, trimmed
from tests.speculative.chain_tables import token_rule as verify_sampled
from tests.speculative.test_block import DRAFTED, block_rule, committed_blocks
from tests.speculative.test_verification_law import committed

FILTERS = {
    "temperature": Sampling(0.7),
    "top-k": Sampling(1.5, top_k=2),
    "top-p": Sampling(1.5, top_p=0.7),
    "min-p": Sampling(2.0, min_p=0.4),
    "typical-p": Sampling(1.5, typical_p=0.6),
    "all": Sampling(1.3, top_k=4, top_p=0.9, min_p=0.1, typical_p=0.95),
}
ENDS = {0, 3}
EXACT = [Rule.TOKEN, Rule.BLOCK, Rule.MATCH]


def filtered(sampling, seed=0, size=5, depth=2):
    """Tables of two random models, both behind the same filters, whose supports differ from prefix to prefix."""
    generator = torch.Generator().manual_seed(seed)

    def make(*_):
        found = probabilities(2 * torch.randn(size, generator=generator), sampling).double()
        return found / found.sum()

    return Tables(size, depth, make, make)


def rounds(rule, tables, limit=None):
    """Every outcome of a round: block, drafts that stay, the token after them, probability."""
    if rule is Rule.TOKEN:
        return committed(verify_sampled, tables, limit)
    return committed_blocks(block_rule, tables, limit) if rule is Rule.BLOCK else matched(verify_match, tables, limit)


def verify_match(p, guess, follow, limits):
    return judge(p, guess, torch.zeros_like(follow[:, :-1]), follow, limits, Rule.MATCH)


def matched(rule, tables, limit=None):
    """The same for rules in which the target draws at every place and what it draws there decides.

    At the places before, uniforms are taken from the middle of the interval on which the draft is drawn.
    """
    blocks, weights = zip(*tables.blocks(), strict=True)
    count, depth = len(blocks), tables.depth
    limit = depth if limit is None else limit
    p, q = stacked(tables, blocks)
    drafted = torch.tensor(blocks)
    guess = Guess(drafted, q, tables.vocabulary)
    follow, alive = torch.full((count, depth + 1), 0.5, dtype=DOUBLE), torch.tensor(weights, dtype=DOUBLE)

    def drawn(place, u):
        """What is drawn at ``place``: it follows, or the draft there was it."""
        at = follow.clone()
        at[:, place] = u
        verdict = rule(p, guess, at, torch.full((count,), limit))
        return torch.where(verdict.accepted > place, drafted[:, min(place, depth - 1)], verdict.following)

    for place in range(limit + 1):
        below = torch.zeros(count, dtype=DOUBLE)
        stays, inside = torch.zeros_like(below), torch.full_like(below, 0.5)
        for token in range(tables.size):
            upto = measure(lambda u, place=place, token=token: drawn(place, u) <= token, count)
            goes_on = (drafted[:, place] == token) if place < limit else torch.zeros(count, dtype=torch.bool)
            for row in ((alive > 1e-15) & ~goes_on).nonzero().flatten().tolist():
                yield blocks[row], place, token, float(alive[row] * (upto[row] - below[row]))
            stays = torch.where(goes_on, upto - below, stays)
            inside = torch.where(goes_on, (upto + below) / 2, inside)
            below = upto
        follow[:, place], alive = inside, alive * stays


def error(outcomes, tables):
    return (law_of(outcomes, tables) - tables.law()).abs().max().item()


@pytest.mark.parametrize("case", DRAFTED)
def test_matching_has_the_target_s_law(case):
    assert error(rounds(Rule.MATCH, CASES[case]), CASES[case]) < 1e-12


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
@pytest.mark.parametrize("case", ["random 5 by 3", "trimmed", "equal"])
def test_matching_keeps_it_at_a_limit(case, limit):
    assert error(rounds(Rule.MATCH, CASES[case], limit), CASES[case]) < 1e-12


def next_place(p, guess, follow, limits):
    """The token after a mismatch from the distribution of the place behind."""
    verdict = verify_match(p, guess, follow, limits)
    late = verify_match(p.roll(-1, 1), guess, follow, torch.zeros_like(limits)).following
    return Verdict(verdict.accepted, torch.where(verdict.accepted == 0, late, verdict.following))


def most_likely(p, guess, follow, limits):
    """Greedy choices above temperature 0."""
    return verify_choices(p.argmax(-1), guess.tokens, limits)


@pytest.mark.parametrize("fault", [next_place, most_likely])
def test_a_planted_fault_breaks_the_law_of_matching(fault):
    assert error(matched(fault, CASES["random 4 by 2"]), CASES["random 4 by 2"]) > 1e-3


@pytest.mark.parametrize("rule", EXACT)
@pytest.mark.parametrize("name", FILTERS)
def test_filters_on_both_sides_keep_the_law_of_the_filtered_target(name, rule):
    tables = filtered(FILTERS[name])
    assert any(bool((p == 0).any()) for p in tables.p.values()) or name == "temperature"
    assert error(rounds(rule, tables), tables) < 1e-12


# An EOS inside a block


@cache
def cut(block, kept, token):
    """What ``Rows.commit`` keeps of the outcome of a round, and whether the row ended there."""
    rows = Rows([[1]], [len(block) + 1], len(block) + 3, [0], torch.device("cpu"))
    verdict = Verdict(torch.tensor([kept]), torch.tensor([token]))
    emitted = int(rows.commit(torch.tensor([[1, *block]]), verdict, torch.tensor(sorted(ENDS)), None))
    return tuple(rows.tokens[0, 1 : 1 + emitted].tolist()), bool(ENDS & set(rows.tokens[0, 1 : 1 + emitted].tolist()))


def texts(starts, tables):
    """The law of texts that end at an EOS or after K + 1 tokens, each start continued by the target."""
    law = defaultdict(float)
    open_texts = list(starts)
    while open_texts:
        text, weight, ended = open_texts.pop()
        if ended or len(text) > tables.depth:
            law[text] += weight
            continue
        for token in range(tables.size):
            open_texts.append(((*text, token), weight * float(tables.p[text][token]), token in ENDS))
    return law


def distance(outcomes, tables, truth):
    starts = []
    for block, kept, token, weight in outcomes:
        text, ended = cut(block, kept, token)
        starts.append((text, weight, ended))
    found, want = texts(starts, tables), texts([((), 1.0, False)], truth)
    return max(abs(found[text] - want[text]) for text in found.keys() | want.keys())


def another_after_the_end(tables, seed=99):
    """The same tables but for prefixes with an EOS in them: what the target says there is no part of any text."""
    other = random(tables.size, tables.depth, seed)
    changed = Tables(tables.size, tables.depth, lambda: None, lambda p: None)
    for prefix in tables.p:
        source = other if ENDS & set(prefix) else tables
        changed.p[prefix], changed.q[prefix] = source.p[prefix], source.q[prefix]
    return changed


@pytest.mark.parametrize("rule", EXACT)
def test_texts_that_end_inside_a_block_have_the_target_s_law(rule):
    whole, behind_filters = random(4, 2, 0), filtered(FILTERS["top-p"], size=4)
    for tables, truth in ((whole, whole), (another_after_the_end(whole), whole), (behind_filters, behind_filters)):
        assert distance(rounds(rule, tables), tables, truth) < 1e-12


@pytest.mark.parametrize("rule", EXACT)
def test_a_trimmed_draft_that_cannot_end_keeps_it(rule):
    tables = trimmed(4, 2, 5, [1, 2])
    assert distance(rounds(rule, tables), tables, tables) < 1e-12


def test_a_cut_behind_the_wrong_end_breaks_it(monkeypatch):
    """A row cut at the last EOS of its block, and not at the first."""
    tables = random(4, 2, 0)
    outcomes = list(rounds(Rule.TOKEN, tables))

    def late(block, kept, token):
        text = (*block[:kept], token)
        places = [place for place, id in enumerate(text) if id in ENDS]
        return (text[: places[-1] + 1] if places else text), bool(places)

    assert distance(outcomes, tables, tables) < 1e-12
    monkeypatch.setattr("tests.speculative.test_enumeration.cut", late)
    assert distance(outcomes, tables, tables) > 1e-3
