"""How many rounds a tree will need for a text, before anything is decoded.

A round that starts at position t ends at a node with the chance that the path to it stays and none of its children does:
R(t) = 1 + Σ_nodes P(ends at node) · R(t + depth + 1). ``chances[d][t][r]``: that of the children at depth d + 1 the one of
rank r stays for the token at t, its parent having stayed; d counts no further where place in the round makes no
difference. Exact when acceptances are independent given the text, as ``cost.rounds_needed`` is, whose value for chains
this is. Knows no model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from speculative.sampling import Sampling, probabilities
from speculative.tree import Tree
from speculative.tree_choice import Rates, TreeCosts, candidates
from speculative.tree_drafter import without_replacement
from speculative.tree_verification import judge

Chances = Sequence[Sequence[Sequence[float]]]  # by depth, by position, by rank


def rank_chances(
    target_logits: Tensor, draft_logits: Tensor, sampling: Sampling, vocabulary: Tensor | None, uniform: Tensor
) -> Tensor:
    """Chance (N, W) that of W children the one of each rank stays: tried in order, none before it having stayed.

    Args:
        target_logits: (N, V).
        draft_logits: (N, D).
        sampling: as both models decode.
        vocabulary: (D,) target id of each draft id; None when D = V.
        uniform: (N, S, W) the numbers that S sets of children are drawn with, over which the chance is a mean. At
            temperature 0 there is one set, the draft's best tokens.
    """
    width = uniform.shape[-1]
    if sampling.greedy:
        best = draft_logits.topk(width, dim=-1).indices
        best = best if vocabulary is None else vocabulary[best]
        return (best == target_logits.argmax(-1, keepdim=True)).double()
    p, q = probabilities(target_logits, sampling), probabilities(draft_logits, sampling)
    inside = p if vocabulary is None else p[:, vocabulary]
    # All ids that the draft lacks are one to it: it never draws them, and they outlast every rejection alike.
    outside = (p.sum(-1, keepdim=True) - inside.sum(-1, keepdim=True)).clamp(min=0.0)
    p, q = torch.cat([inside, outside], 1), torch.nn.functional.pad(q, (0, 1))
    found = []
    for one in uniform.unbind(1):
        chance, _ = judge(p, q, without_replacement(q, one))
        reached = torch.nn.functional.pad((1 - chance).cumprod(-1)[:, :-1], (1, 0), value=1.0)
        found.append(chance * reached)
    return torch.stack(found).mean(0)


def rounds_needed(chances: Chances, tree: Tree) -> float:
    """Expected rounds of ``tree`` to write a text."""
    length = len(chances[0])
    places = [_place(tree, node) for node in range(1, tree.size + 1)]
    remaining = [0.0] * (length + tree.depth + 2)
    for start in range(length - 1, -1, -1):
        limit = min(tree.depth, length - start - 1)  # never more than the tokens still wanted
        alive, ends = [1.0], [1.0]
        for depth, rank, parent in places:
            if depth > limit:
                break
            stays = alive[parent] * chances[min(depth, len(chances)) - 1][start + depth - 1][rank]
            ends[parent] -= stays
            alive.append(stays)
            ends.append(stays)
        expected = 1.0
        for chance, depth in zip(ends, tree.depths, strict=False):  # nodes below the limit are not among ends
            expected += max(chance, 0.0) * remaining[start + depth + 1]
        remaining[start] = expected
    return remaining[0]


def _place(tree: Tree, node: int) -> tuple[int, int, int]:
    """Depth, rank and parent of a node."""
    parent = tree.parents[node - 1]
    return tree.depths[node], tree.children[parent].index(node), parent


def expected_ratio(chances: Chances, tree: Tree, costs: TreeCosts) -> float:
    """Predicted plain time ÷ time with ``tree`` for one text."""
    return len(chances[0]) / (rounds_needed(chances, tree) * costs.round(tree))


def rates(texts: Sequence[Chances], depth: int) -> Rates:
    """Chance, by depth and rank, that a child stays given that its parent did, over rounds that start anywhere.

    Every depth is as wide as the chances are: stretches of text where many drafts stay count more at greater depth.
    """
    found = []
    for d in range(1, depth + 1):
        width = len(texts[0][0][0])
        kept, tried = [0.0] * width, 0.0
        for chances in texts:
            for start in range(len(chances[0]) - d):
                reached = 1.0
                for before in range(1, d):
                    reached *= sum(chances[min(before, len(chances)) - 1][start + before - 1])
                tried += reached
                here = chances[min(d, len(chances)) - 1][start + d - 1]
                kept = [k + reached * chance for k, chance in zip(kept, here, strict=True)]
        found.append([k / tried if tried else 0.0 for k in kept])
    return found


def best_tree(texts: Sequence[Chances], depth: int, costs: TreeCosts) -> tuple[Tree | None, float]:
    """The tree, not deeper than ``depth``, with the highest predicted ratio over all texts, and that ratio.

    (None, 1.0) where plain decoding is faster. Candidates are those of ``tree_choice.candidates``.
    """
    tokens = sum(len(chances[0]) for chances in texts)
    best, ratio = None, 1.0
    for tree in dict.fromkeys(candidates(rates(texts, depth), costs)):
        found = tokens / (sum(rounds_needed(chances, tree) for chances in texts) * costs.round(tree))
        if found > ratio:
            best, ratio = tree, found
    return best, ratio
