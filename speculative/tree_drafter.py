"""A draft model that proposes a tree: one forward for each level, the children of a node drawn without replacement.

Greedy children are the best tokens of the node, in that order. Only nodes that have children are fed; those of the path
that was kept are moved to their positions in the cache, the others are forgotten.
"""

import torch
from torch import Tensor

from speculative.cache import check_branching
from speculative.controls import behind
from speculative.drafters import AroundModel, ModelDrafter, Proposal
from speculative.sampling import Purpose, Sampling, draw, probabilities, round_keys, uniforms
from speculative.tree import Tree
from speculative.tree_verification import Branches, columns


class TreeDrafter(AroundModel):
    """Grows ``tree`` from the draft model of ``model``, for every row of a batch."""

    def __init__(self, model: ModelDrafter, tree: Tree) -> None:
        check_branching(model.draft.model)
        super().__init__(model)
        self.tree = tree

    def propose(self, tokens: Tensor, lengths: Tensor, rows: Tensor, count: int) -> Proposal:
        """Draft the tree down to depth ``count``."""
        tree, model = self.tree.cut(count), self.model
        drafted = tokens.new_zeros(len(tokens), tree.size)
        distributions = []
        for depth, level in enumerate(tree.levels):
            if depth == 0:
                logits = model.catch_up(tokens, lengths)[:, None]
            else:
                fed = model.read(drafted[:, torch.tensor(level) - 1])
                logits = model.choosable(model.cached.feed_nodes(fed, lengths - 1, tree, level))
            model.forwards += 1
            if model.history is not None:
                texts = [behind(tokens, lengths, drafted, columns(tree, node)) for node in level]
                logits = torch.stack([model.controlled(logits[:, i], *text) for i, text in enumerate(texts)], 1)
            q = draw_children(logits, tree, level, model.sampling, model.seed, lengths, rows, model.draft.vocabulary, drafted)
            distributions += [] if q is None else [q]
        model.lengths = lengths
        q = torch.cat(distributions, 1) if distributions else None
        return Proposal(Branches(tree, drafted, q, model.draft.vocabulary), torch.full_like(lengths, tree.depth))

    def keep(self, path: Tensor, lengths: Tensor, tree: Tree) -> None:
        """Move the kept nodes ``path`` (B, depth) of ``tree`` to their positions; it stood below ``lengths`` (B,) tokens."""
        self.model.cached.cache.keep_path(path, lengths - 1)
        fed = (path > 0) & (tree.inner_index.to(path.device)[path] > 0)
        self.model.lengths = lengths + fed.sum(-1)


def draw_children(
    logits: Tensor,
    tree: Tree,
    level: tuple[int, ...],
    sampling: Sampling,
    seed: int,
    lengths: Tensor,
    rows: Tensor,
    vocabulary: Tensor | None,
    drafted: Tensor,
) -> Tensor | None:
    """Write the children of the nodes of a ``level`` into ``drafted`` (B, N), as target ids.

    ``logits`` (B, n, D) are those after the nodes; ``lengths`` and ``rows`` (B,) key the draws. Returns what the children
    were drawn from, (B, n, D); None if greedy.
    """
    children = tree.children_table[list(level)].to(drafted.device)  # (n, width)
    if sampling.greedy:
        q, chosen = None, logits.topk(tree.width, dim=-1).indices
    else:
        q = probabilities(logits, sampling)
        # Node i of a round has key i − 1, as the i-th draft of a chain has.
        keys = round_keys(lengths[:, None, None], (children - 1).clamp(min=0))
        chosen = without_replacement(q, uniforms(seed, rows[:, None, None], keys, Purpose.DRAFT))
    chosen = chosen if vocabulary is None else vocabulary[chosen]
    drafted[:, children[children > 0] - 1] = chosen[:, children > 0]
    return q


def without_replacement(q: Tensor, uniform: Tensor) -> Tensor:
    """Ids (..., W) drawn one after the other from ``q`` (..., V) with ``uniform`` (..., W), none of them twice.

    When q runs out of tokens the rest are arbitrary ids, of which q leaves nothing.
    """
    chosen = []
    for one in uniform.unbind(-1):
        chosen.append(draw(q, one).clamp(max=q.shape[-1] - 1)[..., None])
        q = q.scatter(-1, chosen[-1], 0.0)
    return torch.cat(chosen, -1)
