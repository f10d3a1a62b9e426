"""The codecs by name, how a shard says which of them wrote it, and which losses each can serve.

A loss that follows q reaches ids that a sparse codec did not keep: there it is biased, or its weights q / p have no bound.
Forward KL and min(p, q) follow p. It is refused before training, with a codec that can.
"""

import json
from dataclasses import asdict

from data.dense import Dense
from data.hidden import Hidden
from data.sampled import Sampled
from data.topk import TopK

Codec = TopK | Sampled | Hidden | Dense
FOLLOWS_Q = frozenset({"reverse_kl", "jensen_shannon"})


def describe(codec: Codec) -> str:
    """The codec and its settings as JSON."""
    return json.dumps({"codec": type(codec).__name__} | asdict(codec), sort_keys=True)


def described(text: str) -> Codec:
    """The codec that ``describe`` described."""
    settings = json.loads(text)
    kinds = {kind.__name__: kind for kind in (TopK, Sampled, Hidden, Dense)}
    return kinds[settings.pop("codec")](**settings)


def refusal(codec: str, objective: str) -> str | None:
    """Why ``codec`` cannot serve ``objective`` (names of the configuration), with one that can; None if it can."""
    if codec in ("hidden", "dense") or objective not in FOLLOWS_Q:
        return None
    return f"needs the target's probability of ids that codec={codec} does not keep; use codec=hidden (or codec=dense)"
