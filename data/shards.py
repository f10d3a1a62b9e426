"""One shard of the logit cache: rows and their encoded targets, sealed so that damage and mix-ups are noticed.

The safetensors metadata says which cache and which place in it the shard belongs to, and holds a SHA-256 of that and of
every tensor. One file is renamed into place, so a shard and its checksum cannot be apart.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from data.artifact import atomic
from data.codec import Codec, describe

FLAT = "flat_"  # begins the names of tensors that are not by position


class DamagedShardError(Exception):
    """A shard is missing, damaged, or from another cache; the message names it."""


@dataclass(frozen=True)
class Seal:
    """Where a shard belongs: the fingerprint of its ``cache``, its ``part`` of it, and its ``number`` of ``count``."""

    cache: str
    part: str
    number: int
    count: int
    codec: Codec
    vocabulary: int

    @property
    def file(self) -> str:
        return f"shard-{self.number:05d}.safetensors"

    @property
    def metadata(self) -> dict[str, str]:
        place = {"cache": self.cache, "part": self.part, "number": str(self.number), "count": str(self.count)}
        return place | {"codec": describe(self.codec), "vocabulary": str(self.vocabulary)}


def write_shard(
    folder: Path, rows: list[tuple[list[int], int]], targets: dict[str, Tensor], seal: Seal, more: dict[str, str] | None = None
) -> None:
    """Write rows of (tokens, response start) with their concatenated encoded ``targets`` atomically; the seal names the ids,
    and says what is ``more`` to say.

    Raises:
        ValueError: there is not one target for each response token.
    """
    positions = sum(len(tokens) - start for tokens, start in rows)
    if any(len(tensor) != positions for name, tensor in targets.items() if not name.startswith(FLAT)):
        raise ValueError("a shard needs one target for each response token")
    save_sealed(folder / seal.file, _ids(rows) | targets, seal.metadata | {"ids": hash_of_ids(rows)} | (more or {}))


def hash_of_ids(rows: list[tuple[list[int], int]]) -> str:
    """16 hex digits that differ when an id of ``rows`` does, or where a row or a response begins.

    Of text written anew in the place of that which a shard holds, only this tells.
    """
    tensors = _ids(rows)
    return _digest({}, list(tensors), tensors.__getitem__)[:16]


def _ids(rows: list[tuple[list[int], int]]) -> dict[str, Tensor]:
    return {
        "tokens": torch.tensor([token for tokens, _ in rows for token in tokens], dtype=torch.int32),
        "lengths": torch.tensor([len(tokens) for tokens, _ in rows], dtype=torch.int32),
        "starts": torch.tensor([start for _, start in rows], dtype=torch.int32),
    }


def save_sealed(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors atomically with ``metadata`` and the hash of both."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    metadata = metadata | {"index": _digest(metadata, _index(tensors), tensors.__getitem__)}
    digest = _digest(metadata, list(tensors), tensors.__getitem__)
    with atomic(path) as temporary:
        # One entry: the library writes several in an order that differs from process to process. And its own way to a
        # file goes by a second temporary name, which a killed writer would leave behind.
        temporary.write_bytes(save(tensors, {"seal": json.dumps(metadata | {"sha256": digest}, sort_keys=True)}))


def open_shard(path: Path, expected: dict[str, str]) -> safe_open:
    """A memory-mapped shard whose header and index are whole and whose metadata has the ``expected`` values.

    Raises:
        DamagedShardError: it is missing, cut off or otherwise unreadable, or differs from what is expected.
    """
    try:
        shard = safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise DamagedShardError(f"{path}: this shard is missing") from error
    except (SafetensorError, OSError) as error:
        raise DamagedShardError(f"{path}: this shard is damaged ({error})") from error
    found = seal_of(shard)
    for key, value in expected.items():
        if found.get(key) != value:
            raise DamagedShardError(f"{path}: this shard is from elsewhere: its {key} is {found.get(key)}, not {value}")
    content = {key: value for key, value in found.items() if key not in ("sha256", "index")}
    if _digest(content, _index(shard.keys()), shard.get_tensor) != found.get("index"):
        raise DamagedShardError(f"{path}: this shard is damaged (its index differs from its checksum)")
    return shard


def seal_of(shard: safe_open) -> dict[str, str]:
    """What an open shard says of itself; nothing if it does not."""
    try:
        return dict(json.loads((shard.metadata() or {})["seal"]))
    except (KeyError, ValueError):
        return {}


def check_sum(path: Path, shard: safe_open) -> None:
    """Refuse an open shard whose content differs from its hash.

    Raises:
        DamagedShardError: naming the shard.
    """
    metadata = seal_of(shard)
    stored = metadata.pop("sha256", None)
    if _digest(metadata, list(shard.keys()), shard.get_tensor) != stored:
        raise DamagedShardError(f"{path}: this shard is damaged (its content differs from its checksum)")


def fault(path: Path, expected: dict[str, str]) -> str | None:
    """Why a shard cannot be used, or None."""
    try:
        check_sum(path, open_shard(path, expected))
    except DamagedShardError as error:
        return str(error)
    return None


def _index(names: Iterable[str]) -> list[str]:
    """The small tensors that say where rows lie, which are read before the others."""
    return [name for name in names if name in ("keys", "lengths", "starts", "counts")]


def _digest(metadata: dict[str, str], names: list[str], tensor: Callable[[str], Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(names):
        content = tensor(name)
        digest.update(f"\n{name} {content.dtype} {list(content.shape)}\n".encode())
        digest.update(content.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
