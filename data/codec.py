"""The codecs, how a shard says which of them wrote it, and what a cache of one weighs."""

import json
from dataclasses import asdict

from data.dense import Dense
from data.hidden import Hidden
from data.sampled import Sampled
from data.topk import TopK
from data.topmass import TopMass

Codec = TopK | TopMass | Sampled | Hidden | Dense
HEADER = 1000  # bytes of names, shapes and seal in a shard


def describe(codec: Codec) -> str:
    """The codec and its settings as JSON."""
    return json.dumps({"codec": type(codec).__name__} | asdict(codec), sort_keys=True)


def described(text: str) -> Codec:
    """The codec that ``describe`` described."""
    settings = json.loads(text)
    kinds = {kind.__name__: kind for kind in (TopK, TopMass, Sampled, Hidden, Dense)}
    return kinds[settings.pop("codec")](**settings)


def size(codec: Codec, vocabulary: int, width: int, positions: int, tokens: int, rows: int, shards: int) -> int:
    """Bytes of the shards of a part, metadata counted: ``tokens`` ids of prompts and responses, hidden states of ``width``.

    The most that it can be, where k varies by position.
    """
    return codec.bytes_per_position(vocabulary, width) * positions + 4 * tokens + 8 * rows + HEADER * shards
