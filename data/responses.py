"""What the target wrote: prompt ids and response ids, in Parquet shards of one batch each.

The ids that were generated are the ids that are trained on and measured on; nothing is rendered to text and back.
A shard is whole or absent, so generation continues after the last one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data.artifact import atomic

_SCHEMA = pa.schema(
    [
        ("key", pa.int64()),
        ("split", pa.string()),
        ("prompt_id", pa.string()),
        ("kind", pa.string()),
        ("temperature", pa.float64()),
        ("prompt", pa.list_(pa.int32())),
        ("response", pa.list_(pa.int32())),
        ("stopped", pa.bool_()),
    ]
)


@dataclass(frozen=True)
class Request:
    """A prompt as ids, to be answered at one temperature; ``key`` names its random numbers."""

    key: int
    split: str
    prompt_id: str
    kind: str
    temperature: float
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Response:
    """A request with the ids that the target generated; ``stopped``: it ended itself with an EOS id."""

    request: Request
    tokens: tuple[int, ...]
    stopped: bool

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.tokens)


def batches(requests: Sequence[Request], size: int) -> list[list[Request]]:
    """Groups of at most ``size`` with one temperature each and prompts of similar length, longest first."""
    ordered = sorted(requests, key=lambda r: (r.temperature, -len(r.prompt), r.key))
    groups = [list(group) for _, group in groupby(ordered, key=lambda r: r.temperature)]
    return [group[i : i + size] for group in groups for i in range(0, len(group), size)]


def write_shard(path: Path, responses: Iterable[Response]) -> None:
    """Write one shard atomically."""
    rows = [
        {
            **{name: getattr(r.request, name) for name in ("key", "split", "prompt_id", "kind", "temperature", "prompt")},
            "response": r.tokens,
            "stopped": r.stopped,
        }
        for r in responses
    ]
    with atomic(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), temporary, compression="zstd")


def read_shards(folder: Path) -> Iterator[Response]:
    """All responses of a folder, in the order of shards and rows; equal ids are one object, so each takes eight bytes."""
    ids: dict[int, int] = {}
    for path in sorted(folder.glob("shard-*.parquet")):
        for row in pq.read_table(path, schema=_SCHEMA).to_pylist():
            stopped = row.pop("stopped")
            prompt, tokens = (tuple(map(ids.setdefault, given, given)) for given in (row.pop("prompt"), row.pop("response")))
            yield Response(Request(prompt=prompt, **row), tokens, stopped)
