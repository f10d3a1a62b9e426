"""Losses on drawn ids have the right mean over all draws, value and gradient; counts in the place of p have not."""

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from data.targets import SparseTargets
from pipeline import losses
from pipeline.losses import Support, support
from tests.pipeline.test_gradients import OBJECTIVES, TEXTBOOK
from tests.pipeline.test_losses import draft_ids, noise

SUMS = ["forward_kl", "jensen_shannon", "jensen_shannon_0.2", "total_variation"]
DRAWS = 2
P = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
Draw = tuple[float, SparseTargets]
sums = pytest.mark.parametrize("name", SUMS)


def sampled(temperature: float) -> Iterator[Draw]:
    """Every pair of ids with its chance, each id drawn ∝ p^(1/T)."""
    chances = (P.log() / temperature).softmax(-1)
    for ids in itertools.product(range(len(P)), repeat=DRAWS):
        chosen = torch.tensor(ids)
        weights = 1 / (DRAWS * chances[chosen])
        yield float(chances[chosen].prod()), made(chosen, weights)


def best_two_and_tail() -> Iterator[Draw]:
    """Two ids for certain, and every pair of the others with its chance."""
    others, mass = P[2:], P[2:].sum()
    for ids in itertools.product(range(2, len(P)), repeat=DRAWS):
        chosen = torch.tensor(ids)
        weights = torch.cat([torch.ones(2, dtype=torch.float64), mass / (DRAWS * P[chosen])])
        yield float((others[chosen - 2] / mass).prod()), made(torch.cat([torch.tensor([0, 1]), chosen]), weights, 2)


def made(ids: Tensor, weights: Tensor, certain: int = 0) -> SparseTargets:
    return SparseTargets(ids[None], P[ids].log()[None], torch.tensor([-math.inf]), weights[None], certain)


def counted(targets: SparseTargets) -> SparseTargets:
    """The planted fault: weight times p, which is a count, in the place of p."""
    return SparseTargets(targets.ids, targets.log_probs + targets.weights.log(), targets.log_tail)


CODECS: dict[str, Callable[[], Iterator[Draw]]] = {
    "sampled": lambda: sampled(1.0),
    "tempered": lambda: sampled(2.0),
    "topk with a drawn tail": best_two_and_tail,
}
codecs = pytest.mark.parametrize("codec", CODECS)


def mean(codec: str, loss, ids: Tensor | None, change=lambda targets: targets) -> tuple[Tensor, Tensor]:
    """The mean over all draws of the loss of one draft, and of its gradient in logits."""
    value, gradient = torch.zeros(1, dtype=torch.float64), 0.0
    for chance, targets in CODECS[codec]():
        q = noise(1, 5 if ids is None else int((ids >= 0).sum()), seed=3).requires_grad_()
        one = loss(q.log_softmax(-1), support(change(targets), ids))
        one.sum().backward()
        value, gradient = value + chance * one.detach(), gradient + chance * q.grad
    return value, gradient


def exact(name: str, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """The textbook formula on p over the draft's ids, not renormalised."""
    kept = slice(None) if ids is None else (ids >= 0).nonzero()[:, 0]
    p = P[kept][None]
    q = noise(1, p.shape[1], seed=3).requires_grad_()
    value = TEXTBOOK[name](p, q.softmax(-1))
    value.sum().backward()
    return value.detach(), q.grad


@sums
@codecs
@pytest.mark.parametrize("trimmed", [False, True])
def test_the_mean_over_all_draws_is_the_loss_on_all_ids(name, codec, trimmed):
    ids = draft_ids([0, 2, 4], 5) if trimmed else None
    for found, wanted in zip(mean(codec, OBJECTIVES[name], ids), exact(name, ids), strict=True):
        torch.testing.assert_close(found, wanted)


@sums
@codecs
def test_counts_in_the_place_of_p_are_biased(name, codec):
    value, gradient = mean(codec, OBJECTIVES[name], None, counted)
    wanted, slope = exact(name, None)
    assert abs(float(value - wanted)) > 0.01
    linear = name == "forward_kl" and codec != "tempered"  # counts that add up to 1 serve what is linear in p
    assert (float((gradient - slope).abs().max()) > 1e-3) is not linear


@pytest.mark.parametrize("trimmed", [False, True])
@sums
def test_the_best_draft_is_the_same_as_with_the_whole_distribution(name, trimmed):
    # Not renormalised, a position weighs as the mass that the draft can say; its best q is p over that mass.
    ids = draft_ids([0, 2, 4], 5) if trimmed else None
    best = (P if ids is None else P[[0, 2, 4]]).log().log_softmax(-1)[None]

    def at(log_q: Tensor) -> float:
        return sum(chance * float(OBJECTIVES[name](log_q, support(targets, ids))) for chance, targets in sampled(1.0))

    least = at(best)
    for seed in range(10):
        assert at((best + 0.5 * noise(1, best.shape[1], seed=seed)).log_softmax(-1)) > least - 1e-12


def test_what_follows_the_draft_refuses_drawn_ids():
    for _, targets in sampled(1.0):
        with pytest.raises(ValueError, match="weights of drawn ids would have no bound"):
            losses.reverse_kl(noise(1, 5).log_softmax(-1), support(targets, None))


def weighed(name: str, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """What hybrid and −log overlap are to be in the mean: their factor is of the two certain ids, the rest of all ids."""
    kept = slice(None) if ids is None else (ids >= 0).nonzero()[:, 0]
    p, q = P[kept][None], noise(1, 5 if ids is None else int((ids >= 0).sum()), seed=3).requires_grad_()
    least = torch.minimum(p, q.softmax(-1))
    certain = least[:, torch.arange(5)[kept] < 2].sum(-1).detach()
    if name == "overlap":
        value = -certain.log() - (least.sum(-1) - certain) / certain
    else:
        weight = torch.exp(-3.0 * certain)
        value = weight * (p * (p / q.softmax(-1)).log()).sum(-1) + (1 - weight) * (1 - least.sum(-1))
    value.sum().backward()
    return value.detach(), q.grad


@pytest.mark.parametrize("name", ["overlap", "hybrid"])
@pytest.mark.parametrize("trimmed", [False, True])
def test_a_sum_weighed_by_the_certain_overlap_has_no_bias(name, trimmed):
    ids = draft_ids([0, 2, 4], 5) if trimmed else None
    for found, wanted in zip(mean("topk with a drawn tail", OBJECTIVES[name], ids), weighed(name, ids), strict=True):
        torch.testing.assert_close(found, wanted)


def test_weighed_by_the_overlap_of_the_same_draw_it_would_be_biased(monkeypatch):
    def of_the_draw(log_q: Tensor, target: Support) -> Tensor:
        return 1 - losses.total_variation(log_q, target).detach()

    monkeypatch.setattr(losses, "_certain_overlap", of_the_draw)
    for name in ("overlap", "hybrid"):
        _, gradient = mean("topk with a drawn tail", OBJECTIVES[name], None)
        assert float((gradient - weighed(name, None)[1]).abs().max()) > 1e-3


def test_the_logarithm_of_an_estimated_overlap_would_be_biased():
    log_q = noise(1, 5, seed=3).log_softmax(-1)
    overlap = torch.minimum(P, log_q.exp()).sum()
    estimates = [(chance, 1 - losses.total_variation(log_q, support(t, None))) for chance, t in sampled(1.0)]
    assert sum(chance * float(e) for chance, e in estimates) == pytest.approx(float(overlap))
    assert sum(-chance * math.log(e) for chance, e in estimates) > -math.log(overlap) + 0.02


@pytest.mark.parametrize("rare", [1e-3, 1e-6, 1e-9])
def test_a_rare_id_that_was_drawn_pulls_no_harder_than_a_common_one(rare):
    # Its weight is 1 / p: what follows p stays bounded, what follows q would not.
    for beta in (0.2, 0.5):
        z = torch.tensor([[0.0, 0.0]], dtype=torch.float64, requires_grad=True)
        ids, weights = torch.tensor([[1]]), torch.tensor([[1 / rare]], dtype=torch.float64)
        target = Support(ids, torch.tensor([[rare]], dtype=torch.float64), torch.zeros(1), weights)
        losses.jensen_shannon(z.log_softmax(-1), target, beta).sum().backward()
        # −β on log q of the drawn id, shared with the other one: a half of it.
        torch.testing.assert_close(z.grad, beta * torch.tensor([[0.5, -0.5]], dtype=torch.float64), atol=1e-3, rtol=0)


def test_the_mean_over_many_positions_passes_a_z_test_that_counts_fail():
    generator = torch.Generator().manual_seed(0)
    log_p, log_q = noise(4000, 60).log_softmax(-1), noise(4000, 60, seed=1).log_softmax(-1)
    ids = torch.multinomial(log_p.exp(), 12, replacement=True, generator=generator)
    found = log_p.gather(1, ids)
    targets = SparseTargets(ids, found, torch.full((4000,), -math.inf), 1 / (12 * found.exp()))
    for name in SUMS:
        exactly = TEXTBOOK[name](log_p.exp(), log_q.exp())
        for honest, given in ((True, targets), (False, counted(targets))):
            error = OBJECTIVES[name](log_q, support(given, None)) - exactly
            z = abs(float(error.mean() / (error.std() / len(error) ** 0.5)))
            assert z < 4 if honest else z > 8, (name, honest, z)
