"""Every objective has the value and gradient of its textbook formula in float64.

Three oracles: the closed form of the gradient in logits, autograd of the dense formula, and finite differences.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from data.targets import DenseTargets
from pipeline import losses
from pipeline.losses import Support, support
from tests.pipeline.test_losses import draft_ids, noise, stored

Function = Callable[[Tensor, Support], Tensor]
OBJECTIVES: dict[str, Function] = {
    "forward_kl": losses.forward_kl,
    "reverse_kl": losses.reverse_kl,
    "jensen_shannon": lambda log_q, target: losses.jensen_shannon(log_q, target, 0.5),
    "jensen_shannon_0.2": lambda log_q, target: losses.jensen_shannon(log_q, target, 0.2),
    "total_variation": losses.total_variation,
    "overlap": losses.negative_log_overlap,
    "hybrid": lambda log_q, target: losses.hybrid(log_q, target, 3.0),
}
each = pytest.mark.parametrize("name", OBJECTIVES)


def mixture(beta: float) -> Function:
    def divergence(p: Tensor, q: Tensor) -> Tensor:
        m = beta * p + (1 - beta) * q
        return (beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()).sum(-1)

    return divergence


def textbook_hybrid(p: Tensor, q: Tensor) -> Tensor:
    variation = (p - q).abs().sum(-1) / 2
    weight = torch.exp(-3.0 * torch.minimum(p, q).sum(-1)).detach()
    return weight * (p * (p / q).log()).sum(-1) + (1 - weight) * variation


TEXTBOOK = {
    "forward_kl": lambda p, q: (p * (p / q).log()).sum(-1),
    "reverse_kl": lambda p, q: (q * (q / p).log()).sum(-1),
    "jensen_shannon": mixture(0.5),
    "jensen_shannon_0.2": mixture(0.2),
    "total_variation": lambda p, q: 1 - torch.minimum(p, q).sum(-1),
    "overlap": lambda p, q: -torch.minimum(p, q).sum(-1).log(),
    "hybrid": textbook_hybrid,
}


def by_q(name: str, p: Tensor, q: Tensor) -> Tensor:
    """The derivative of the objective by each q, by hand."""
    if name == "forward_kl":
        return -p / q
    if name == "reverse_kl":
        return (q / p).log() + 1
    if name.startswith("jensen_shannon"):
        beta = 0.2 if name.endswith("0.2") else 0.5
        return (1 - beta) * (q / (beta * p + (1 - beta) * q)).log()
    if name == "total_variation":
        return (q - p).sign() / 2
    overlap = torch.minimum(p, q).sum(-1, keepdim=True)
    if name == "overlap":
        return -(q < p).double() / overlap
    weight = torch.exp(-3.0 * overlap)
    return weight * (-p / q) + (1 - weight) * (q - p).sign() / 2


def by_logits(name: str, p: Tensor, q: Tensor) -> Tensor:
    """Through q = softmax(z): q (g − Σ q g)."""
    g = by_q(name, p, q)
    return q * (g - (q * g).sum(-1, keepdim=True))


def merged(log: Tensor, ids: Tensor) -> Tensor:
    """Probabilities of the stored ids and of all others together, by adding them up."""
    p = log.softmax(-1)
    others = torch.stack([p[i, [j for j in range(p.shape[1]) if j not in ids[i].tolist()]].sum() for i in range(len(p))])
    return torch.cat([p.gather(1, ids), others[:, None]], 1)


@each
def test_the_gradient_is_the_closed_form(name):
    p, q = noise(6, 11), noise(6, 11, seed=1).requires_grad_()
    OBJECTIVES[name](q.log_softmax(-1), support(stored(p, 11), None)).sum().backward()
    expected = by_logits(name, p.softmax(-1), q.detach().softmax(-1))
    torch.testing.assert_close(q.grad, expected, atol=1e-7, rtol=1e-7)


def test_the_best_known_closed_forms_are_what_the_oracle_says():
    p, q = noise(6, 11).softmax(-1), noise(6, 11, seed=1).softmax(-1)
    torch.testing.assert_close(by_logits("forward_kl", p, q), q - p)
    divergence = (q * (q / p).log()).sum(-1, keepdim=True)
    torch.testing.assert_close(by_logits("reverse_kl", p, q), q * ((q / p).log() - divergence))
    # Total variation pushes up what is below p, whatever is missing there, and down what is above.
    low = (q < p).double()
    torch.testing.assert_close(by_logits("total_variation", p, q), q * ((q * low).sum(-1, keepdim=True) - low))
    # −log overlap: the same direction, divided by the overlap.
    overlap = torch.minimum(p, q).sum(-1, keepdim=True)
    torch.testing.assert_close(by_logits("overlap", p, q), by_logits("total_variation", p, q) / overlap)


@each
@pytest.mark.parametrize("kept", [None, [0, 2, 3, 7, 10]])
@pytest.mark.parametrize("dense", [False, True])
def test_value_and_gradient_are_those_of_the_dense_textbook_formula(name, kept, dense):
    p = noise(6, 11)
    ids = None if kept is None else draft_ids(kept, 11)
    target = support(DenseTargets(p.log_softmax(-1)), ids) if dense else support(stored(p, 11), ids)
    inside = p.softmax(-1) if kept is None else p[:, kept].softmax(-1)  # restricted and renormalised
    found, expected = (noise(6, inside.shape[1], seed=1).requires_grad_() for _ in range(2))
    value = OBJECTIVES[name](found.log_softmax(-1), target)
    oracle = TEXTBOOK[name](inside, expected.softmax(-1))
    assert value.shape == (6,)
    torch.testing.assert_close(value, oracle, atol=1e-7, rtol=1e-7)
    value.sum().backward()
    oracle.sum().backward()
    torch.testing.assert_close(found.grad, expected.grad, atol=1e-7, rtol=1e-7)


@each
@pytest.mark.parametrize("k", [1, 4])
def test_a_sparse_target_is_the_formula_on_stored_ids_and_one_other(name, k):
    p = noise(6, 11)
    targets = stored(p, k)
    found, expected = (noise(6, 11, seed=1).requires_grad_() for _ in range(2))
    value = OBJECTIVES[name](found.log_softmax(-1), support(targets, None))
    oracle = TEXTBOOK[name](merged(p, targets.ids), merged(expected, targets.ids))
    torch.testing.assert_close(value, oracle)
    value.sum().backward()
    oracle.sum().backward()
    torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "hybrid"])
@pytest.mark.parametrize("k", [3, 7])
def test_finite_differences_agree(name, k):
    target = support(stored(noise(3, 7, seed=5), k), None)
    q = noise(3, 7, seed=6).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: OBJECTIVES[name](z.log_softmax(-1), target), (q,))


def test_finite_differences_agree_on_the_hybrid_with_its_weight_held():
    # The weight is a constant for the gradient, so differences of the whole must not agree, and of the parts must.
    target = support(stored(noise(3, 7, seed=5), 3), None)
    q = noise(3, 7, seed=6)
    weight = torch.exp(-3.0 * (1 - losses.total_variation(q.log_softmax(-1), target)))

    def held(z: Tensor) -> Tensor:
        log_q = z.log_softmax(-1)
        return weight * losses.forward_kl(log_q, target) + (1 - weight) * losses.total_variation(log_q, target)

    z = q.clone().requires_grad_()
    assert torch.autograd.gradcheck(held, (z,))
    [expected] = torch.autograd.grad(held(z).sum(), z)
    [found] = torch.autograd.grad(losses.hybrid(z.log_softmax(-1), target, 3.0).sum(), z)
    torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(lambda z: losses.hybrid(z.log_softmax(-1), target, 3.0), (z,))


def test_finite_differences_agree_on_cross_entropy():
    ids = torch.tensor([2, -1, 0])
    q = noise(3, 7, seed=6).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: losses.cross_entropy(z.log_softmax(-1), ids), (q,))
