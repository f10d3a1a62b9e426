"""The target's next-token distributions on disk, read by row: safetensors shards, each encoded by one codec.

The token ids lie beside their targets: position j of a row's targets is the distribution of response token j. Shards are
memory-mapped, a few at a time, and checked against their hash when they are first read. Only an index of lengths stays.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from data.codec import Codec, described
from data.hidden import HEAD, Hidden, through_head
from data.shards import FLAT, DamagedShardError, check_sum, open_shard, save_sealed, seal_of
from data.targets import Targets
from data.topmass import TopMass

BRANCHES = ("cuts", "survival")  # tensors of a shard of branches, which stand beside what the codec stores
OPEN = 8  # shards mapped at once: pages of a mapped file count as resident memory


@dataclass(frozen=True)
class Row:
    """One prompt and response: ``tokens`` (T,), the response starts at ``start``; ``targets`` of its T − start tokens.

    Where what starts there are branches (see ``data.branches``), ``cuts`` (T − start,) says where each token's left the
    trunk, ``targets`` are of what follows each, and ``survival`` (T − start,) is the chance that it comes to that.
    """

    tokens: Tensor
    start: int
    targets: Targets
    cuts: Tensor | None = None
    survival: Tensor | None = None


def write_head(folder: Path, cache: str, weight: Tensor, bias: Tensor | None) -> None:
    """Store the target's head (V, d) once beside the parts of a cache of hidden states."""
    tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    save_sealed(folder / HEAD, {name: tensor.detach().cpu() for name, tensor in tensors.items()}, {"cache": cache})


class LogitCache:
    """Rows of one part (a folder of shards) of the cache with fingerprint ``cache``.

    Raises:
        DamagedShardError: a shard is missing, damaged, or from another cache or part; naming it.
    """

    def __init__(self, folder: Path, cache: str) -> None:
        self.lengths: list[int] = []
        self.starts: list[int] = []
        self._places: list[tuple[int, int, int]] = []  # shard, first token, first target
        self._spans: list[dict[str, slice]] = []  # of tensors that are not by position; by row, if the codec has any
        self._paths = sorted(folder.glob("shard-*.safetensors"))
        self._checked: set[int] = set()
        self._hold()
        self._head: tuple[Tensor, Tensor | None] | None = None
        self._head_path, self._cache = folder.parent / HEAD, cache
        if not self._paths:
            if folder.is_dir():
                raise DamagedShardError(f"{folder}: its shards are missing")
            return  # a part without rows has no folder
        first = seal_of(open_shard(self._paths[0], {"cache": cache, "part": folder.name}))
        self._codec: Codec = described(first["codec"])
        self._vocabulary = int(first["vocabulary"])
        self._paths = [folder / f"shard-{number:05d}.safetensors" for number in range(int(first["count"]))]
        same = {key: first[key] for key in ("cache", "part", "count", "codec", "vocabulary")}
        for number, path in enumerate(self._paths):
            self._index(number, open_shard(path, same | {"number": str(number)}))

    def _hold(self) -> None:
        self._mapped = lru_cache(OPEN)(self._map)

    def __getstate__(self) -> dict[str, Any]:
        """For another process: it maps the shards itself."""
        return {name: value for name, value in vars(self).items() if name != "_mapped"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._hold()

    def _index(self, number: int, shard: safe_open) -> None:
        token = target = 0
        for length, start in zip(shard.get_tensor("lengths").tolist(), shard.get_tensor("starts").tolist(), strict=True):
            self.lengths.append(length)
            self.starts.append(start)
            self._places.append((number, token, target))
            token, target = token + length, target + length - start
        if isinstance(self._codec, TopMass):
            self._index_flat(shard.get_tensor("counts"))

    def _index_flat(self, counts: Tensor) -> None:
        """Where the ids of each row of the shard indexed last begin and end; ``counts`` by position of that shard."""
        ends: dict[str, int] = {}
        for index in range(len(self._spans), len(self.lengths)):
            target, count = self._places[index][2], self.lengths[index] - self.starts[index]
            spans = {}
            for name, length in self._codec.flat_lengths(counts[target : target + count], self._vocabulary).items():
                begin = ends.get(name, 0)
                ends[name] = begin + length
                spans[name] = slice(begin, ends[name])
            self._spans.append(spans)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def positions(self) -> int:
        """Number of target positions."""
        return sum(self.lengths) - sum(self.starts)

    def __getitem__(self, index: int) -> Row:
        number, token, target = self._places[index]
        length, start = self.lengths[index], self.starts[index]
        shard = self._mapped(number)
        places = slice(target, target + length - start)
        stored = {
            name: shard.get_slice(name)[self._spans[index][name] if name.startswith(FLAT) else places]
            for name in shard.keys()  # noqa: SIM118
            if name not in ("tokens", "lengths", "starts")
        }
        cuts, survival = (stored.pop(name, None) for name in BRANCHES)
        tokens = shard.get_slice("tokens")[token : token + length].long()
        return Row(tokens, start, self._decode(stored), None if cuts is None else cuts.long(), survival)

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """Ids (N,) of the response of a row, and the states (N, d), float32, that the target's head read for each.

        Raises:
            ValueError: the cache was written by another codec than hidden.
        """
        if not isinstance(self._codec, Hidden):
            raise ValueError("this cache holds no hidden states; write it with codec=hidden")
        number, token, target = self._places[index]
        length, start = self.lengths[index], self.starts[index]
        shard = self._mapped(number)
        names = [name for name in shard.keys() if name in ("hidden", "scales")]  # noqa: SIM118
        stored = {name: shard.get_slice(name)[target : target + length - start] for name in names}
        return shard.get_slice("tokens")[token + start : token + length].long(), self._codec.decode_hidden(stored)

    def head(self) -> tuple[Tensor, Tensor | None]:
        """The target's head, (V, d) and bias (V,) or None, in float32; of a cache of codec hidden."""
        if self._head is None:
            head = open_shard(self._head_path, {"cache": self._cache})
            check_sum(self._head_path, head)
            bias = head.get_tensor("bias").float() if "bias" in head.keys() else None  # noqa: SIM118
            self._head = head.get_tensor("weight").float(), bias
        return self._head

    def _map(self, number: int) -> safe_open:
        if number in self._checked:
            return safe_open(self._paths[number], framework="pt")
        shard = open_shard(self._paths[number], {"cache": self._cache})
        check_sum(self._paths[number], shard)
        self._checked.add(number)
        return shard

    def _decode(self, stored: dict[str, Tensor]) -> Targets:
        if not isinstance(self._codec, Hidden):
            return self._codec.decode(stored, self._vocabulary)
        return through_head(self._codec.decode_hidden(stored), *self.head())
