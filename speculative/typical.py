"""Typical acceptance, a lossy rule: a draft stays if the target finds it likely enough, whatever it was drawn from.

Token x stays if p(x) > min(ε, δ · exp(−H(p))), p the distribution that plain decoding would draw from and H its entropy in
nats; of several branches the longest stays, and the token after it is drawn from p (Medusa, Cai et al., 2401.10774, section
2.3.1). The law of the output is not the target's. How far it is from it is measured here, never assumed; no other rule is
known. Shapes: B rows, N drafted nodes, V target vocabulary, D draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from speculative.sampling import draw
from speculative.tree import Tree
from speculative.tree_verification import Branches
from speculative.verification import Guess, Verdict


@dataclass(frozen=True)
class Typical:
    """The two thresholds: ``epsilon`` ε where the target is sure, ``delta`` δ where it is not; δ = √ε, as in the paper.

    Raises:
        ValueError: one of them does not lie in (0, 1].
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"typical: {name} must lie in (0, 1], not {getattr(self, name)}")

    def keeps(self, p: Tensor) -> Tensor:
        """Whether each token would stay if it was drafted, (..., V), under the target's ``p`` (..., V)."""
        return p > self.threshold(p)[..., None]

    def threshold(self, p: Tensor) -> Tensor:
        """min(ε, δ · exp(−H(p))), (...) float64."""
        entropy = torch.special.entr(p).sum(-1, dtype=torch.float64)
        return (self.delta * (-entropy).exp()).clamp(max=self.epsilon)


def verify_typical(p: Tensor, guess: Guess | Branches, follow: Tensor, limits: Tensor, typical: Typical) -> Verdict:
    """Keep the longest branch of which every token stays, the first drawn of equally long ones.

    Args:
        p: (B, N+1, V) target distributions after all filters, after the anchor and after each drafted node.
        guess: the drafts, a chain or a tree; what they were drawn from has no say.
        follow: (B, depth+1) uniforms for the token that follows; entry j is used when j drafted tokens stay.
        limits: (B,) depth of each row that counts; nodes deeper are as if never proposed.
        typical: the thresholds.
    """
    if guess.depth == 0:
        return Verdict(torch.zeros_like(limits), draw(p[:, 0], follow[:, 0]))
    tree = guess.tree if isinstance(guess, Branches) else Tree.of((1,) * guess.depth)
    row = torch.arange(len(p), device=p.device)
    parents, depths = (torch.tensor(values, device=p.device) for values in (tree.parents, tree.depths[1:]))
    kept = p[row[:, None], parents, guess.tokens] > typical.threshold(p)[:, parents]
    # Lost (B, N): the node itself does not stay, or one that leads to it.
    lost = (~kept[:, None] & tree.sees[1:, 1:].to(p.device)).any(-1)
    accepted, place = torch.where(lost | (depths > limits[:, None]), 0, depths).max(-1)  # the first of the deepest
    node = torch.where(accepted > 0, place + 1, 0)
    following = draw(p[row, node], follow[row, accepted])
    path = tree.path_table.to(p.device)[node] if isinstance(guess, Branches) else None
    return Verdict(accepted, following, path)


def emitted(p: Tensor, q: Tensor, vocabulary: Tensor | None, typical: Typical) -> Tensor:
    """The law (..., V) of the token that a chain emits where a draft is judged, exactly.

        law(x) = q(x) · [x stays] + (1 − Σ_y q(y) · [y stays]) · p(x)

    ``p`` (..., V) and ``q`` (..., D) are after all filters; ``vocabulary`` (D,) is the target id of each draft id.
    """
    stays = staying(p, q, vocabulary, typical)
    return stays + (1.0 - stays.sum(-1, keepdim=True)).clamp_(min=0.0) * p


def staying(p: Tensor, q: Tensor, vocabulary: Tensor | None, typical: Typical) -> Tensor:
    """The part of q on tokens that stay, (..., V); its sum is the chance that a draft does."""
    drafted = q.to(p.dtype) if vocabulary is None else torch.zeros_like(p).index_copy_(-1, vocabulary, q.to(p.dtype))
    return torch.where(typical.keeps(p), drafted, 0.0)


def divergence(p: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
    """Total variation ½ Σ |law − p| and KL(law ‖ p) in nats, (...) each, of a ``law`` (..., V) from the target's ``p``.

    In this direction KL is finite: whatever the rule emits, the target gives a chance. The other one is infinite where
    the draft never leaves what stays.
    """
    terms = torch.where(law > 0, law * (law.log() - p.log()), 0.0)
    return (law - p).abs().sum(-1) / 2, terms.sum(-1)


def excess(p: Tensor, tokens: Tensor, typical: Typical) -> Tensor:
    """For each of n emitted ``tokens`` (n,): whether it would stay if drafted, less the chance of that under p (n, V).

    The mean over a text is 0 in expectation if its law is the target's, for any set of tokens that depends on the text
    before alone. For every other law its size bounds the mean total variation from below. It asks nothing of how the
    tokens came about: chains, trees and heads alike.
    """
    keeps = typical.keeps(p)
    return keeps.gather(-1, tokens[:, None]).squeeze(-1).double() - torch.where(keeps, p, 0.0).sum(-1, dtype=torch.float64)
