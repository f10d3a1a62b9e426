"""Who races in the comparison of drafters, and how each is set: chains as long and trees as wide as pays for them here.

Every way is set on validation prompts, by costs that are measured in turns and by what stays of its longest drafts; the
prompts that are raced have no say. It knows no file and no table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.progress import track
from transformers import PreTrainedModel

import speculative
from data.responses import Response
from pipeline import lossy, trees
from pipeline.config import Decoding
from pipeline.proposer import Proposer
from speculative import MedusaHeads, PromptLookup, Sampling
from speculative.calibration import measure
from speculative.cost import Costs
from speculative.metrics import Acceptance, total
from speculative.tree_choice import TreeCosts

REPEATS = 4  # of every timing, the first to warm up
TEXTS = 10  # validation prompts that are decoded to set a way


@dataclass(frozen=True)
class Trained:
    """A drafter and the wall seconds of its training; ``name`` is what the table calls it."""

    name: str
    proposer: Proposer
    seconds: float

    @property
    def bytes(self) -> int:
        """Its weights as they decode, before they are packed."""
        kept = self.proposer if isinstance(self.proposer, MedusaHeads) else self.proposer.model
        return sum(tensor.numel() * tensor.element_size() for tensor in kept.parameters())


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

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "words": self.words,
            "bytes": self.trained.bytes if self.trained else 0,
            "training_seconds": self.trained.seconds if self.trained else 0.0,
        }


def ways(
    target: PreTrainedModel,
    model: Trained,
    heads: Trained | None,
    texts: Sequence[Response],
    sampling: Sampling,
    config: Decoding,
    seed: int,
) -> list[Way]:
    """All ways at one temperature, plain decoding the first. ``texts`` are answers to validation prompts."""
    some = [replace(text, tokens=text.tokens[: config.max_new_tokens]) for text in texts[:TEXTS]]
    common = {"sampling": sampling, **lossy.rule(config), "seed": seed}
    trained = [one for one in (model, heads) if one is not None]
    chains, branching = _costs(target, trained, [text.request.prompt for text in texts], sampling, config)
    looked = replace(chains[model.name], draft=0.0)
    lookup = {"lookup": PromptLookup()}
    found = [Way("none", "plain decoding", {"num_draft_tokens": 0, **common})]
    found.append(_chain(target, Way("prompt lookup", "", lookup | common), some, looked))
    for one in trained:
        found.append(_chain(target, Way(f"{one.name}, chain", "", common, one), some, chains[one.name]))
        if trees.used(config):
            choice = trees.choose(target, one.proposer, some, sampling, config, branching[one.name], seed)
            found.append(Way(f"{one.name}, tree", choice.words, {"tree": choice.tree, **common}, one))
    # Where lookup matches, drafting costs less than this.
    found.append(_chain(target, Way("lookup else model", "", lookup | common, model), some, chains[model.name]))
    return found


def _costs(
    target: PreTrainedModel, trained: Sequence[Trained], prompts: Sequence[Sequence[int]], sampling: Sampling, config: Decoding
) -> tuple[dict[str, Costs], dict[str, TreeCosts]]:
    """Costs of chains and of trees by the name of the drafter, measured in turns."""
    repeats = [prompts[i % len(prompts)] for i in range(REPEATS)]
    chains: dict[str, Iterator[Costs]] = {}
    branching: dict[str, Iterator[TreeCosts]] = {}
    for one in trained:
        longest = _longest(one.proposer, config)
        chains[one.name] = measure(target, one.proposer, repeats, sampling, longest)
        if trees.used(config):
            branching[one.name] = trees.calibrated(target, one.proposer, repeats, sampling, config)
    found: tuple[dict[str, Costs], dict[str, TreeCosts]] = ({}, {})
    for _ in track(range(REPEATS - 1), description=f"{'costs of drafters':<28}", transient=True):
        found = ({name: next(steps) for name, steps in chains.items()}, {name: next(s) for name, s in branching.items()})
    return found


def _longest(proposer: Proposer, config: Decoding) -> int:
    return min(config.longest_draft, proposer.count) if isinstance(proposer, MedusaHeads) else config.longest_draft


def _chain(target: PreTrainedModel, way: Way, texts: Sequence[Response], costs: Costs) -> Way:
    """The way at the K that pays best."""
    at_most = replace(way, options={"num_draft_tokens": costs.longest, **way.options})
    done = [
        at_most.decode(target, text.request.prompt, len(text.tokens), row_keys=[text.request.key])
        for text in track(texts, description=f"{way.name:<28}", transient=True)
    ]
    length = best_length(total(one.acceptance[0] for one in done), costs)
    return replace(way, words=f"K = {length}", options={"num_draft_tokens": length, **way.options})


def best_length(counts: Acceptance, costs: Costs) -> int:
    """The K ≥ 1 with the most tokens for its cost; of m drafts that stayed in ``counts``, at the longest, K keeps min(m, K)."""

    def speed(length: int) -> float:
        kept = sum(min(m, length) * number for row in counts.rounds for m, number in enumerate(row))
        return (kept / counts.target_forwards + 1) / costs.round(length)

    return max(range(1, costs.longest + 1), key=speed)
