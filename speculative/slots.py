"""The cache that transformers' models write into: one slot per position, allocated once, a place announced per forward.

The only file that touches the private side of transformers' cache classes; what the slots mean is said in ``cache``.
"""

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

Stores = list[tuple[Tensor, Tensor]]  # keys and values (B, heads, capacity, head_dim) of every layer


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, each (B, heads, capacity, head_dim), allocated at the first write."""

    def __init__(self, owner: "SlotCache") -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def allocate(states: Tensor) -> Tensor:
            return states.new_zeros(self.owner.batch, states.shape[1], self.owner.capacity, states.shape[-1])

        self.keys, self.values = allocate(key_states), allocate(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        where, visible, filled = self.owner.where, self.owner.visible, self.owner.filled
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            if filled is not None:
                store[filled, :, where] = states
            elif isinstance(where, slice):
                store[:, :, where] = states
            else:
                rows = torch.arange(len(where), device=where.device)[:, None]
                store[rows, :, where] = states.transpose(1, 2)
        if filled is not None:  # nothing came before
            return key_states, value_states
        return self.keys[:, :, :visible], self.values[:, :, :visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.visible, 0

    def get_seq_length(self) -> int:
        return self.owner.visible if self.owner.filled is None else 0

    def get_max_length(self) -> int:
        return self.owner.capacity


class _GivenLayer(CacheLayerMixin):
    """One layer's keys and values as they lie in a ``SlotCache``, for a forward that writes the same slots in every row."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.slots, self.is_initialized = keys, values, slots, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to do."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.slots, key_states)
        self.values.index_copy_(2, self.slots, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return self.keys.shape[2]

    def get_max_length(self) -> int:
        return self.keys.shape[2]


def slot_by_slot(model: PreTrainedModel, stores: Stores, slots: Tensor) -> dict[str, Cache]:
    """The argument by which ``model`` takes a cache that writes into ``slots`` (n,) of ``stores`` and shows all of them."""
    return {argument(model): Cache(layers=[_GivenLayer(keys, values, slots) for keys, values in stores])}


def argument(model: PreTrainedModel) -> str:
    # transformers renames the argument; models move to the new name one by one.
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


class SlotCache(Cache):
    """The layers of one model and where the current forward writes. With ``whole`` every slot is shown to a single row."""

    def __init__(self, layers: int, batch: int, capacity: int, whole: bool = False) -> None:
        self.batch, self.capacity, self.whole = batch, capacity, whole
        self.visible = 0
        self.where: slice | Tensor = slice(0, 0)
        self.filled: Tensor | None = None
        super().__init__(layers=[_SlotLayer(self) for _ in range(layers)])

    def place(self, positions: Tensor) -> None:
        """Announce the positions (B, n) of the tokens about to be fed, rising in each row; position 0 may be repeated first."""
        first, last = int(positions.min()), int(positions.max())
        if last >= self.capacity:
            raise IndexError(f"position {last} lies outside a cache of {self.capacity} slots")
        uniform = last - first + 1 == positions.shape[1] and bool((positions[:, -1] == last).all())
        self.where = slice(first, last + 1) if uniform else positions
        self.visible, self.filled = self.capacity if self.whole and self.batch == 1 else last + 1, None

    def place_first(self, rows: Tensor, length: int) -> None:
        """Announce the first ``length`` tokens of some ``rows`` of the batch, which alone are about to be fed."""
        self.where, self.visible, self.filled = slice(0, length), length, rows

    def written(self) -> Tensor:
        """The slots (n,) that the current forward writes in the first row."""
        where = self.where
        return torch.arange(where.start, where.stop) if isinstance(where, slice) else where[0]

    def stores(self) -> Stores:
        """What every layer holds; empty before the first write."""
        return [(layer.keys, layer.values) for layer in self.layers if layer.is_initialized]

    def keep_path(self, path: Tensor, anchors: Tensor) -> None:
        """Copy nodes of the trees below ``anchors`` (B,), their ``path`` (B, n) with 0 behind it, to their positions."""
        rows = torch.arange(len(path), device=path.device)[:, None]
        positions = anchors[:, None] + 1 + torch.arange(path.shape[1], device=path.device)
        slots = torch.where(path > 0, anchors[:, None] + path, positions)
        for layer in self.layers:
            for store in (layer.keys, layer.values):
                store[rows, :, positions] = store[rows, :, slots]

    def select(self, rows: Tensor) -> None:
        """Keep the given rows (indices into the batch), in that order."""
        self.batch = len(rows)
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]
