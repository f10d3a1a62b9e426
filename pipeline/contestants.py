"""Who races in the comparison of drafters, and how each is set: chains as long and trees as wide as pays for them here.

Every way is set on validation prompts, by costs that are measured in turns and by what stays of its longest drafts; the
prompts that are raced have no say. It knows no file and no table.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.progress import track
from transformers import PreTrainedModel

import speculative
from data.responses import Response
from pipeline import lossy, trees
from pipeline.config import Decoding
from pipeline.gate import MIB, extra_memory
from pipeline.proposer import Proposer
from pipeline.spread import spread
from speculative import MedusaHeads, PromptLookup, Sampling
from speculative.calibration import measure
from speculative.cost import Costs
from speculative.metrics import Acceptance, total
from speculative.tree_choice import TreeCosts

REPEATS = 4  # of every timing, the first to warm up
TEXTS = 10  # validation prompts that are decoded to set a way
LONGEST_MATCH = 3  # tokens that prompt lookup looks for first


@dataclass(frozen=True)
class Trained:
    """A drafter and the wall seconds of its training; ``name`` is what the table calls it."""

    name: str
    proposer: Proposer
    seconds: float

    def bytes(self, positions: int) -> int:
        """Its weights and their packed copies, and a model's keys and values of one sequence of ``positions``."""
        heads = isinstance(self.proposer, MedusaHeads)
        kept = self.proposer if heads else self.proposer.model
        packed = (layer.weight for layer in kept.modules() if getattr(layer, "packed", None) is not None)
        weights = sum(tensor.numel() * tensor.element_size() for tensor in (*kept.parameters(), *packed))
        return weights if heads else weights + round(extra_memory(kept.config, 0, kept.dtype.itemsize, positions) * MIB)


@dataclass(frozen=True)
class Way:
    """One way of decoding: ``options`` of ``speculative.generate``; ``words`` say them, ``trained`` may be None."""

    name: str
    words: str
    options: dict[str, Any]
    trained: Trained | None = None

    def decode(self, target: PreTrainedModel, prompt: Sequence[int], new_tokens: int, **more: Any) -> speculative.Generation:
        draft = self.trained and self.trained.proposer
        return speculative.generate(target, draft, [prompt], max_new_tokens=new_tokens, **self.options, **more)

    def facts(self, positions: int) -> dict[str, Any]:
        """Plain values, as JSON has them: None where it is not known how long training took; ``positions`` as in ``bytes``."""
        seconds = self.trained.seconds if self.trained else 0.0
        return {
            "name": self.name,
            "words": self.words,
            "bytes": self.trained.bytes(positions) if self.trained else 0,
            "training_seconds": None if math.isnan(seconds) else seconds,
        }


def ways(
    target: PreTrainedModel,
    model: Trained,
    heads: Trained | None,
    texts: Sequence[Response],
    sampling: Sampling,
    config: Decoding,
    seed: int,
    ids: int | None = None,
) -> list[Way]:
    """All ways at one temperature, plain decoding the first. ``texts`` are answers to validation prompts.

    ``ids`` of the target can be drawn, rows of its head behind them are padding.
    """
    some = [replace(text, tokens=text.tokens[: config.max_new_tokens]) for text in spread(texts, TEXTS)]
    common = {"sampling": sampling, **lossy.rule(config), "seed": seed, "vocabulary_size": ids}
    trained = [one for one in (model, heads) if one is not None]
    chains, branching = _costs(target, trained, [text.request.prompt for text in spread(texts, REPEATS)], sampling, config, ids)
    found = [Way("none", "plain decoding", {"num_draft_tokens": 0, **common})]
    found.append(_lookup(target, Way("prompt lookup", "", common), some, chains[model.name]))
    for one in trained:
        found.append(_chain(target, Way(f"{one.name}, chain", "", common, one), some, chains[one.name]))
        if trees.used(config):
            choice = trees.choose(target, one.proposer, some, sampling, config, branching[one.name], seed, ids)
            found.append(Way(f"{one.name}, tree", choice.words, {"tree": choice.tree, **common}, one))
    found.append(_lookup(target, Way("lookup else model", "", common, model), some, chains[model.name]))
    return found


def _costs(
    target: PreTrainedModel,
    trained: Sequence[Trained],
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    config: Decoding,
    ids: int | None,
) -> tuple[dict[str, Costs], dict[str, TreeCosts]]:
    """Costs of chains and of trees by the name of the drafter, measured in turns."""
    repeats = [prompts[i % len(prompts)] for i in range(REPEATS)]
    chains: dict[str, Iterator[Costs]] = {}
    branching: dict[str, Iterator[TreeCosts]] = {}
    for one in trained:
        longest = _longest(one.proposer, config)
        chains[one.name] = measure(target, one.proposer, repeats, sampling, longest, ids)
        if trees.used(config):
            branching[one.name] = trees.calibrated(target, one.proposer, repeats, sampling, config, ids)
    found: tuple[dict[str, Costs], dict[str, TreeCosts]] = ({}, {})
    for _ in track(range(REPEATS - 1), description=f"{'costs of drafters':<28}", transient=True):
        found = ({name: next(steps) for name, steps in chains.items()}, {name: next(s) for name, s in branching.items()})
    return found


def _longest(proposer: Proposer, config: Decoding) -> int:
    return min(config.longest_draft, proposer.count) if isinstance(proposer, MedusaHeads) else config.longest_draft


def _chain(target: PreTrainedModel, way: Way, texts: Sequence[Response], costs: Costs) -> Way:
    """The way at the K that pays best."""
    length, _ = best_length(*_counted(target, way, texts, costs.longest), costs)
    return replace(way, words=f"K = {length}", options={"num_draft_tokens": length, **way.options})


def _lookup(target: PreTrainedModel, way: Way, texts: Sequence[Response], costs: Costs) -> Way:
    """The same with prompt lookup, at the shortest n-gram, 1 to LONGEST_MATCH, that pays best with it."""
    found: dict[int, tuple[int, float]] = {}
    for shortest in range(1, LONGEST_MATCH + 1):
        with_lookup = replace(way, options={"lookup": PromptLookup(LONGEST_MATCH, shortest), **way.options})
        found[shortest] = best_length(*_counted(target, with_lookup, texts, costs.longest), costs)
    shortest = max(found, key=lambda size: found[size][1])
    length, _ = found[shortest]
    options = {"lookup": PromptLookup(LONGEST_MATCH, shortest), "num_draft_tokens": length, **way.options}
    return replace(way, words=f"K = {length} after {shortest} or more equal tokens", options=options)


def _counted(target: PreTrainedModel, way: Way, texts: Sequence[Response], length: int) -> tuple[Acceptance, float]:
    """Rounds at K = ``length``, and the share of their drafts that a model made."""
    at_most = replace(way, options={"num_draft_tokens": length, **way.options})
    done = [
        at_most.decode(target, text.request.prompt, len(text.tokens), row_keys=[text.request.key])
        for text in track(texts, description=f"{way.name:<28}", transient=True)
    ]
    counts = total(one.acceptance[0] for one in done)
    if "lookup" not in way.options:
        return counts, 1.0
    return counts, sum(one.draft_forwards for one in done) / max(counts.proposed, 1)


def best_length(counts: Acceptance, by_model: float, costs: Costs) -> tuple[int, float]:
    """The K ≥ 1 with the most tokens for its cost, and that speed in tokens a plain step.

    Of ``counts``, at the longest K: a round with p drafts of which m stayed has min(p, K) of them at K, and min(m, K) stay;
    without a draft it costs a plain step. A model makes the share ``by_model`` of the drafts, the others cost nothing.
    """
    costs = replace(costs, draft=by_model * costs.draft, heads=by_model * costs.heads)

    def speed(length: int) -> float:
        rounds = [(min(p, length), min(m, length), n) for p, row in enumerate(counts.rounds) for m, n in enumerate(row)]
        return sum((kept + 1) * n for _, kept, n in rounds) / sum(costs.round(drafts) * n for drafts, _, n in rounds)

    speeds = {length: speed(length) for length in range(1, costs.longest + 1)}
    best = max(speeds, key=speeds.__getitem__)
    return best, speeds[best]
