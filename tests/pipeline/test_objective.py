"""The configuration chooses its objective and mixes in hard cross-entropy; masks and weights act on positions by hand."""

import math

import pytest
import torch

from data.targets import SparseTargets
from pipeline import losses
from pipeline.choices import Divergence
from pipeline.config import Objective
from pipeline.errors import PipelineError
from pipeline.losses import cross_entropy, support, weighted_mean
from pipeline.objective import values
from tests.pipeline.test_losses import draft_ids, noise, row, stored

# p: ½, ¼, ¼; q: ¼, ½, ¼.
TARGET = support(SparseTargets(torch.tensor([[0, 1, 2]]), row(0.5, 0.25, 0.25).log(), row(1e-30).log()[0]), None)
LOG_Q = row(0.25, 0.5, 0.25).log()
WRITTEN = torch.tensor([0])
BY_HAND = {
    "forward_kl": 0.5 * math.log(2) + 0.25 * math.log(0.5),
    "reverse_kl": 0.25 * math.log(0.5) + 0.5 * math.log(2),
    # m: ⅜, ⅜, ¼.
    "jensen_shannon": (0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)),
    "total_variation": 0.25,
    "overlap": -math.log(0.75),
    "hybrid": math.exp(-2.25) * 0.25 * math.log(2) + (1 - math.exp(-2.25)) * 0.25,
    "cross_entropy": math.log(4),
}


@pytest.mark.parametrize("divergence", Divergence)
def test_every_divergence_by_hand(divergence):
    found = values(Objective(divergence=divergence), LOG_Q, TARGET, WRITTEN)
    assert found.shape == (1,)
    assert found.item() == pytest.approx(BY_HAND[divergence.name], abs=1e-6)


def test_beta_and_eta_reach_their_formula():
    skewed = values(Objective(divergence=Divergence.jensen_shannon, beta=0.2), LOG_Q, TARGET, WRITTEN).item()
    # m = 0.2 p + 0.8 q: 0.3, 0.45, 0.25.
    forward = 0.5 * math.log(0.5 / 0.3) + 0.25 * math.log(0.25 / 0.45)
    reverse = 0.25 * math.log(0.25 / 0.3) + 0.5 * math.log(0.5 / 0.45)
    assert skewed == pytest.approx(0.2 * forward + 0.8 * reverse, abs=1e-6)
    assert skewed != pytest.approx(BY_HAND["jensen_shannon"], abs=1e-3)
    for eta, expected in ((0.0, BY_HAND["forward_kl"]), (1000.0, 0.25)):
        assert values(Objective(divergence=Divergence.hybrid, eta=eta), LOG_Q, TARGET, WRITTEN).item() == pytest.approx(
            expected, abs=1e-6
        )


@pytest.mark.parametrize("divergence", Divergence)
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_hard_cross_entropy_is_mixed_in_by_its_share(divergence, share):
    found = values(Objective(divergence=divergence, hard_weight=share), LOG_Q, TARGET, WRITTEN).item()
    assert found == pytest.approx((1 - share) * BY_HAND[divergence.name] + share * math.log(4), abs=1e-6)


def test_hard_cross_entropy_by_hand():
    log_q = row(0.25, 0.5, 0.25).log().repeat(3, 1).requires_grad_()
    found = cross_entropy(log_q.log_softmax(-1), torch.tensor([1, -1, 2]))
    assert found.tolist() == pytest.approx([math.log(2), 0.0, math.log(4)])
    found.sum().backward()
    # q − 1 of the id; an id that the draft lacks teaches nothing.
    torch.testing.assert_close(
        log_q.grad, torch.tensor([[0.25, -0.5, 0.25], [0.0, 0.0, 0.0], [0.25, 0.5, -0.75]], dtype=torch.float64)
    )


def test_the_mean_of_cross_entropy_over_what_p_draws_has_the_gradient_of_forward_kl():
    p = noise(1, 6)
    by_draw, by_p = (noise(1, 6, seed=1).requires_grad_() for _ in range(2))
    log_q = by_draw.log_softmax(-1).expand(6, 6)
    (cross_entropy(log_q, torch.arange(6)) * p.softmax(-1)[0]).sum().backward()
    losses.forward_kl(by_p.log_softmax(-1), support(stored(p, 6), None)).sum().backward()
    torch.testing.assert_close(by_draw.grad, by_p.grad)


def test_a_written_token_that_the_draft_lacks_leaves_the_divergence_alone():
    target = support(SparseTargets(torch.tensor([[0, 1]]), row(0.75, 0.25).log(), row(1e-30).log()[0]), draft_ids([1, 2], 3))
    config = Objective(divergence=Divergence.forward_kl, hard_weight=0.5)
    found = values(config, row(0.5, 0.5).log(), target, torch.tensor([-1]))
    # p restricted to what the draft has: all on its id 0.
    assert found.item() == pytest.approx(0.5 * math.log(2), abs=1e-6)


def test_masks_and_weights_by_hand():
    found = torch.tensor([1.0, 2.0, 6.0])
    assert weighted_mean(found).item() == 3.0
    assert weighted_mean(found, torch.tensor([1.0, 0.0, 1.0])).item() == 3.5
    assert weighted_mean(found, torch.tensor([3.0, 0.0, 1.0])).item() == 2.25
    assert weighted_mean(found, torch.tensor([30.0, 0.0, 10.0])).item() == 2.25


def test_a_masked_position_gives_no_gradient_whatever_it_says():
    q = noise(3, 5).requires_grad_()
    found = values(Objective(), q.log_softmax(-1), support(stored(noise(3, 5, seed=1), 5), None), torch.zeros(3).long())
    weighted_mean(found, torch.tensor([1.0, 0.0, 0.5])).backward()
    assert q.grad[1].tolist() == [0.0] * 5
    assert bool((q.grad[[0, 2]] != 0).all())
    assert weighted_mean(torch.tensor([1.0, math.inf]), torch.tensor([1.0, 0.0])).item() == 1.0


@pytest.mark.parametrize("weights", [torch.zeros(2), None])
def test_a_batch_that_is_masked_as_a_whole_is_refused(weights):
    found = torch.ones(2) if weights is not None else torch.ones(0)
    with pytest.raises(PipelineError, match=r"no position that counts, all are masked: give responses of at least one token"):
        weighted_mean(found, weights)
