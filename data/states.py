"""The hidden states that the target's head read while it wrote: one file beside each shard of responses.

With them the logit cache needs one product with the head where it would need the whole target again. A file is sealed like a
shard of the cache, with its own name and that of its folder, the fingerprint of the run. It knows nothing of heads and codecs.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from data.shards import DamagedShardError, check_sum, fault, open_shard, save_sealed


class DamagedStatesError(Exception):
    """States are missing, damaged or from another run; the message names the file, or the request."""


def write_states(path: Path, keys: Sequence[int], states: Sequence[Tensor]) -> None:
    """Write the states (tokens, width) of the response to each request of ``keys``, atomically and sealed."""
    lengths = torch.tensor([len(part) for part in states])
    whole = torch.cat([part for part in states if len(part)] or [torch.zeros(0, 0)])
    save_sealed(path, {"keys": torch.tensor(keys), "lengths": lengths, "states": whole.cpu()}, _place(path))


def states_fault(path: Path) -> str | None:
    """Why a file of states cannot be used, or None."""
    return fault(path, _place(path))


class States:
    """Reads the states of single responses from a folder; a file is checked against its hash when it is first read.

    Raises:
        DamagedStatesError: a file is damaged, or from another run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[int, tuple[Path, int, int]] = {}
        self._checked: set[Path] = set()
        for path in sorted(folder.glob("states-*.safetensors")):
            file, start = self._open(path), 0
            for key, length in zip(file.get_tensor("keys").tolist(), file.get_tensor("lengths").tolist(), strict=True):
                self._places[key] = (path, start, start + length)
                start += length

    def of(self, key: int) -> Tensor:
        """States (tokens, width) of the response to request ``key``, in the format they were computed in.

        Raises:
            DamagedStatesError: nothing was kept for it, or the file is damaged.
        """
        if key not in self._places:
            raise DamagedStatesError(f"{self._folder}: the states of the response to request {key} are missing")
        path, start, end = self._places[key]
        return self._open(path, path not in self._checked).get_slice("states")[start:end]

    def _open(self, path: Path, whole: bool = False) -> safe_open:
        """A file whose header and index are whole; with ``whole``, all of it is checked."""
        try:
            file = open_shard(path, _place(path))
            if whole:
                check_sum(path, file)
                self._checked.add(path)
        except DamagedShardError as error:
            raise DamagedStatesError(str(error)) from error
        return file


def states_file(shard: Path) -> Path:
    """Where the states of the responses of ``shard`` lie."""
    return shard.with_name(shard.name.replace("shard-", "states-")).with_suffix(".safetensors")


def _place(path: Path) -> dict[str, str]:
    """What the seal of a file of states says."""
    return {"responses": path.parent.name, "file": path.name}
