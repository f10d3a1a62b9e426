"""The hidden states that the target's head read while it wrote: one file beside each shard of responses.

With them the logit cache needs one product with the head where it would need the whole target again. It knows nothing of
heads and codecs.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.artifact import atomic


def write_states(path: Path, keys: Sequence[int], states: Sequence[Tensor]) -> None:
    """Write the states (tokens, width) of the response to each request of ``keys``, atomically."""
    ends = torch.tensor([len(part) for part in states]).cumsum(0)
    whole = torch.cat([part for part in states if len(part)] or [torch.zeros(0, 0)])
    with atomic(path) as temporary:
        save_file({"keys": torch.tensor(keys), "ends": ends, "states": whole.cpu().contiguous()}, temporary)


class States:
    """Reads the states of single responses from a folder."""

    def __init__(self, folder: Path) -> None:
        self._places: dict[int, tuple[Path, int, int]] = {}
        for path in sorted(folder.glob("states-*.safetensors")):
            with safe_open(path, framework="pt") as file:
                ends = file.get_tensor("ends").tolist()
                for key, start, end in zip(file.get_tensor("keys").tolist(), [0, *ends], ends, strict=False):
                    self._places[key] = (path, start, end)

    def of(self, key: int) -> Tensor:
        """States (tokens, width) of the response to request ``key``, in the format they were computed in.

        Raises:
            KeyError: nothing was kept for it.
        """
        path, start, end = self._places[key]
        with safe_open(path, framework="pt") as file:
            return file.get_slice("states")[start:end]


def states_file(shard: Path) -> Path:
    """Where the states of the responses of ``shard`` lie."""
    return shard.with_name(shard.name.replace("shard-", "states-")).with_suffix(".safetensors")
