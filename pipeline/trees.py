"""The tree of a run: what calibration times for it, which one is raced, and what it should bring.

Rates come from decoding validation prompts with a wide tree (or the given one), costs from calibration; the test prompts
have no say in either. It knows no stage and no file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import mul
from typing import Any

from rich.progress import track
from transformers import PreTrainedModel

import speculative
from data.responses import Response
from pipeline import lossy
from pipeline.config import Decoding
from pipeline.errors import PipelineError
from pipeline.proposer import Proposer
from speculative import MedusaHeads, Sampling, Tree
from speculative.cache import check_branching
from speculative.calibration import WIDTHS, measure_trees
from speculative.metrics import Ranks
from speculative.tree import LARGEST
from speculative.tree_choice import Rates, TreeCosts, best_tree, expected_ratio, tokens_per_round

AUTO, OFF = "auto", "off"
BRANCHES = (4, 2, 2)  # of the tree that rates are measured with; one below, down to the longest chain


@dataclass(frozen=True)
class Choice:
    """``tree`` and what is expected of it; ``rates`` by depth and rank, on validation prompts.

    ``recommended`` is False where plain decoding should be faster than every tree, and this one is raced all the same.
    """

    tree: Tree
    rates: Rates
    predicted: float
    tokens_per_round: float
    recommended: bool

    @property
    def words(self) -> str:
        """Its size and shape: nodes by depth."""
        levels = [sum(depth == d for depth in self.tree.depths) for d in range(1, self.tree.depth + 1)]
        shape = "a chain of" if self.tree.width == 1 else "a tree of"
        nodes = "node" if self.tree.size == 1 else "nodes"
        return f"{shape} {self.tree.size} {nodes} ({' + '.join(map(str, levels))} by depth)"


def used(config: Decoding) -> bool:
    return config.tree != OFF


def widths(config: Decoding) -> tuple[int, ...]:
    """Widths w of the trees (w, 1) to time, enough for the tree that the configuration names."""
    if config.tree == AUTO:
        return WIDTHS
    tree, found = Tree.of(config.tree), WIDTHS[:1]
    while 2 * found[-1] < tree.size or found[-1] < max(map(len, tree.levels)):
        found = (*found, 2 * found[-1])
    return found


def calibrated(
    target: PreTrainedModel,
    draft: Proposer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    config: Decoding,
    ids: int | None = None,
    new_tokens: int = 32,
) -> Iterator[TreeCosts]:
    """Costs as ``measure_trees`` yields them; ``ids`` can be drawn, rows of the heads behind them are padding.

    Raises:
        PipelineError: one of the two models cannot have branches.
    """
    for model in (target,) if isinstance(draft, MedusaHeads) else (target, draft.model):
        try:
            check_branching(model)
        except ValueError as error:
            raise PipelineError(f"decoding.tree={config.tree}: {error}; give decoding.tree=off") from error
    if isinstance(draft, MedusaHeads) and draft.count < 2:
        fix = "trees are timed two levels deep, one Medusa head is too few; give decoding.tree=off"
        raise PipelineError(f"decoding.tree={config.tree}: {fix}")
    if config.tree != AUTO and Tree.of(config.tree).width > draft.size:
        fix = f"the draft has {draft.size} output ids, give fewer branches at a node"
        raise PipelineError(f"decoding.tree={config.tree}: {fix}")
    timed = [width for width in widths(config) if width <= draft.size]
    return measure_trees(target, draft, prompts, sampling, timed, new_tokens, ids)


def choose(
    target: PreTrainedModel,
    draft: Proposer,
    texts: Sequence[Response],
    sampling: Sampling,
    config: Decoding,
    costs: TreeCosts,
    seed: int,
    ids: int | None = None,
) -> Choice:
    """The tree to race after ``texts``, answers to validation prompts, were decoded again with a tree."""
    fixed = config.tree != AUTO
    shape = Tree.of(config.tree) if fixed else wide(draft, config)
    rates = measured(target, draft, texts, shape, sampling, seed, ids, **lossy.rule(config))
    if fixed:
        tree = Tree.of(config.tree)
        ratio = expected_ratio(tree, rates, costs)
        return Choice(tree, rates, ratio, tokens_per_round(tree, rates), ratio > 1)
    found, _ = best_tree(rates, costs)
    tree = found or Tree.of((1,))  # without a draft there would be nothing to measure
    return Choice(tree, rates, expected_ratio(tree, rates, costs), tokens_per_round(tree, rates), found is not None)


def wide(draft: Proposer, config: Decoding) -> Tree:
    """What rates are measured with: as deep as chains are calibrated, or as there are heads, or as a tree may have nodes."""
    depth = min(config.longest_draft, draft.count) if isinstance(draft, MedusaHeads) else config.longest_draft
    branches = [min(width, draft.size) for width in (*BRANCHES, *[1] * depth)[:depth]]
    nodes = accumulate(accumulate(branches, mul))  # down to each depth
    return Tree.of([width for width, count in zip(branches, nodes, strict=True) if count <= LARGEST])


def measured(
    target: PreTrainedModel,
    draft: Proposer,
    texts: Sequence[Response],
    tree: Tree,
    sampling: Sampling,
    seed: int,
    ids: int | None = None,
    **rule: Any,
) -> Rates:
    """Rates by depth and rank of ``tree``, after each prompt for as many tokens as its answer in ``texts`` has.

    ``rule``: how branches are judged, as options of ``speculative.generate``.
    """
    counts = []
    for text in track(texts, description=f"{f'branches at {sampling.temperature:g}':<28}", transient=True):
        done = speculative.generate(
            target,
            draft,
            [text.request.prompt],
            max_new_tokens=len(text.tokens),
            tree=tree,
            sampling=sampling,
            **rule,
            seed=seed,
            row_keys=[text.request.key],
            vocabulary_size=ids,
        )
        counts.append(done.ranks)
    return reduce(_added, counts).rates


def _added(a: Ranks, b: Ranks) -> Ranks:
    """The counts of both, of one tree."""
    pairs = ((a.tried, b.tried), (a.kept, b.kept))
    return Ranks(*(tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in zip(*pair, strict=True)) for pair in pairs))
