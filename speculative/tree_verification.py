"""Which branch of a draft tree stays, and which token follows it.

Several children of one node were drawn from q without replacement. They are tried in order: child i stays with
probability min(1, p_i(x) / q_i(x)); if not, p becomes the residual (p_i − q_i)⁺ and q loses x, both renormalised. When
none stays, the token is drawn from the last residual. The law of the committed tokens is the target's (SpecInfer, Miao
et al., 2305.09781; without replacement: Jeon et al., 2402.14160; Sequoia, Chen et al., 2402.12374). Pure functions; no
model, no cache. Shapes: B rows, N drafted nodes, V target vocabulary, D draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from speculative.sampling import draw
from speculative.tree import Tree
from speculative.verification import Verdict


@dataclass(frozen=True)
class Branches:
    """What was drafted: ``tokens`` (B, N) target ids of the nodes of ``tree``.

    ``q`` (B, inner nodes, D) are the distributions that the children of each inner node were drawn from, before any was
    drawn; None at temperature 0. ``vocabulary`` (D,) is the sorted target id of each draft id, None when both are one.
    """

    tree: Tree
    tokens: Tensor
    q: Tensor | None = None
    vocabulary: Tensor | None = None

    @property
    def depth(self) -> int:
        """The most drafts that can stay."""
        return self.tree.depth

    @property
    def paths(self) -> list[list[int]]:
        """For the anchor and each node, the columns of ``tokens`` that lead to it, its own the last."""
        return [columns(self.tree, node) for node in range(self.tree.size + 1)]

    def q_at(self, node: Tensor, like: Tensor) -> Tensor:
        """q of ``node`` (B,) over the target's ids, in the shape and type of ``like`` (B, V); anything for leaves."""
        row = torch.arange(len(node), device=node.device)
        index = self.tree.inner_index.to(node.device)[node].clamp(min=0)
        q = self.q[row, index].to(like.dtype)
        return q if self.vocabulary is None else torch.zeros_like(like).index_copy_(1, self.vocabulary, q)


def columns(tree: Tree, node: int) -> list[int]:
    """Where the drafts that lead to ``node`` stand among the drafted tokens."""
    return [passed - 1 for passed in tree.path(node)]


def judge(p: Tensor, q: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The children of one node.

    Args:
        p: (B, V) the target's distribution after the node.
        q: (B, V) what the first child was drawn from, the others without replacement.
        tokens: (B, W) the children's ids in the order in which they were drawn, −1 where there is none.

    Returns:
        The chance (B, W) float64 that each child stays if none before it did, and the weights (B, V), not normalised,
        of the token that follows if none stays. A child that q cannot have given, since it came before or q ran out of
        tokens, counts as not proposed.
    """
    chances = []
    for token in tokens.split(1, 1):
        drawn = token.clamp(min=0)
        p_mass, q_mass = (weights.sum(-1, keepdim=True, dtype=torch.float64) for weights in (p, q))
        at_p, at_q = (weights.gather(1, drawn).double() for weights in (p, q))
        proposed = (token >= 0) & (at_q > 0)
        chance = (at_p / p_mass) / (at_q / q_mass)
        chances.append(torch.where(proposed, chance.clamp(max=1.0), 0.0))
        residual = (p / p_mass - q / q_mass).clamp_(min=0.0).to(p.dtype)
        # p = q up to rounding leaves no residual; a rejection then has probability zero up to rounding, and p is exact.
        p = torch.where(proposed & (residual.sum(-1, keepdim=True) > 0), residual, p)
        q = q.scatter(1, drawn, 0.0)
    return torch.cat(chances, 1), p


def verify_tree(p: Tensor, branches: Branches, accept: Tensor, follow: Tensor, limits: Tensor) -> Verdict:
    """Walk down from the anchor while a child stays.

    Args:
        p: (B, N+1, V) target distributions after the anchor and after each node.
        branches: the drafts, with the distributions after all filters that they were drawn from.
        accept: (B, N) uniforms for the acceptance tests of the nodes.
        follow: (B, depth+1) uniforms for the token that follows; entry j is used when j drafted tokens stay.
        limits: (B,) depth of each row that counts; nodes deeper are as if never proposed.
    """
    row = torch.arange(len(p), device=p.device)
    table = branches.tree.children_table.to(p.device)
    node, going = torch.zeros_like(limits), torch.ones_like(limits, dtype=torch.bool)
    weights, path = p[:, 0], []
    for depth in range(1, branches.tree.depth + 1):
        children = table[node]
        index = (children - 1).clamp(min=0)
        tokens = torch.where(children > 0, branches.tokens.gather(1, index), -1)
        at_node = p[row, node]
        chances, residual = judge(at_node, branches.q_at(node, at_node), tokens)
        stays = accept.gather(1, index) < chances
        tried = going & (depth <= limits)
        going = tried & stays.any(-1)
        child = children.gather(1, stays.long().argmax(-1, keepdim=True)).squeeze(1)
        node = torch.where(going, child, node)
        weights = torch.where(tried[:, None], torch.where(going[:, None], p[row, node], residual), weights)
        path.append(torch.where(going, child, 0))
    nodes = torch.stack(path, 1)
    accepted = (nodes > 0).sum(-1)
    return Verdict(accepted, draw(weights, follow[row, accepted]), nodes)


def verify_tree_choices(choices: Tensor, branches: Branches, limits: Tensor) -> Verdict:
    """Walk down while a child is the target's own choice; ``choices`` (B, N+1) after the anchor and after each node."""
    row = torch.arange(len(choices), device=choices.device)
    table = branches.tree.children_table.to(choices.device)
    node, going = torch.zeros_like(limits), torch.ones_like(limits, dtype=torch.bool)
    path = []
    for depth in range(1, branches.tree.depth + 1):
        children = table[node]
        tokens = branches.tokens.gather(1, (children - 1).clamp(min=0))
        right = (children > 0) & (tokens == choices[row, node][:, None])
        going = going & (depth <= limits) & right.any(-1)
        child = children.gather(1, right.long().argmax(-1, keepdim=True)).squeeze(1)
        node = torch.where(going, child, node)
        path.append(torch.where(going, child, 0))
    nodes = torch.stack(path, 1)
    return Verdict((nodes > 0).sum(-1), choices[row, node], nodes)
