"""What the acceptance rules decide row by row: limits, rows apart, trimmed drafts; greedy drafts against a plain loop.

Their law is summed in ``test_verification_law``.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative.verification import verify_choices
from tests.speculative.chain_tables import DOUBLE, scene
from tests.speculative.chain_tables import token_rule as verify_sampled


def verify_greedy(choices, drafted, limits=None):
    limits = torch.full((len(choices),), drafted.shape[1]) if limits is None else limits
    return verify_choices(choices, drafted, limits)


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
