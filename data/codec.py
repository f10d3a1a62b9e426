"""The codecs, how a shard says which of them wrote it, and what a cache of one weighs."""

import json
from dataclasses import asdict

from data.dense import Dense
from data.hidden import Hidden
from data.sampled import Sampled
from data.topk import TopK

Codec = TopK | Sampled | Hidden | Dense
HEADER = 1000  # bytes of names, shapes and seal in a shard


def describe(codec: Codec) -> str:
    """The codec and its settings as JSON."""
    return json.dumps({"codec": type(codec).__name__} | asdict(codec), sort_keys=True)


def described(text: str) -> Codec:
    """The codec that ``describe`` described."""
    settings = json.loads(text)
    kinds = {kind.__name__: kind for kind in (TopK, Sampled, Hidden, Dense)}
    return kinds[settings.pop("codec")](**settings)


def size(codec: Codec, vocabulary: int, width: int, positions: int, tokens: int, rows: int, shards: int) -> int:
    """Bytes of a cache, all metadata counted: ``tokens`` prompt and response ids, ``width`` of the target's hidden state."""
    head = 4 * vocabulary * width if isinstance(codec, Hidden) else 0
    return codec.bytes_per_position(vocabulary, width) * positions + 4 * tokens + 8 * rows + HEADER * shards + head
