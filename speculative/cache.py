"""A key-value cache with one slot per position.

Slot = position, so nothing is ever moved: a rejected token's slot is overwritten when its position is fed again, and
a query at position t sees the slots ≤ t and nothing else. Rows of a batch may stand at different positions. The only
file that touches the private side of transformers' cache classes.
"""

import inspect
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin


class UnsupportedModelError(ValueError):
    """The model's cache cannot be rolled back by forgetting slots."""


def check_supported(config: PreTrainedConfig) -> None:
    """Refuse, by name, attention that does not keep one slot for every position."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise UnsupportedModelError(f"{config.model_type}: layers of kind {sorted(kinds)} cannot be rolled back exactly")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise UnsupportedModelError(
            f"{config.model_type}: sliding_window={config.sliding_window} cannot be rolled back exactly"
        )
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{config.model_type}: only decoder-only models are supported")


_EXACT: WeakSet[PreTrainedModel] = WeakSet()  # models that passed check_exact


def check_exact(model: PreTrainedModel) -> None:
    """Refuse a model whose logits change when tokens are fed in pieces, in a batch, or over a forgotten slot.

    Not every architecture reads the mask and positions it is given; the few that do not are found by trying, once.
    """
    if model in _EXACT:
        return
    _EXACT.add(model)  # before the trial, which feeds the model itself
    try:
        with torch.inference_mode():
            tokens = torch.tensor([[1, 3, 2, 5, 4, 6, 2, 7], [4, 2, 2, 3, 1, 5, 7, 3]], device=model.device)
            tokens = tokens % model.config.vocab_size
            ends = torch.tensor([[6, 7], [2, 3]], device=model.device)  # the rows stand at different places
            row = torch.arange(2, device=model.device)
            whole = model(input_ids=tokens, use_cache=False).logits[row, ends[:, -1]].float()
            if not bool(whole.isfinite().all()):
                raise ValueError("the model gives logits that are NaN or infinite")
            cached = CachedModel(model, 2, 10)
            cached.prefill(tokens.flip(1), ends[:, -1])  # to be overwritten
            cached.prefill(tokens, ends[:, 0])
            pieces = cached.feed(tokens.gather(1, ends), ends, keep=1)[:, -1].float()
        tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 5e-2
        exact = torch.allclose(pieces, whole, rtol=0, atol=tolerance * float(whole.abs().max()))
    except Exception as error:  # an architecture that is not what the cache expects fails in ways of its own
        _EXACT.discard(model)
        raise UnsupportedModelError(f"{model.config.model_type}: its cache cannot be used ({error})") from error
    if not exact:
        _EXACT.discard(model)
        raise UnsupportedModelError(f"{model.config.model_type}: its output depends on how tokens are fed; it is not supported")


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


class SlotCache(Cache):
    """The layers of one model and where the current forward writes."""

    def __init__(self, layers: int, batch: int, capacity: int) -> None:
        self.batch, self.capacity = batch, capacity
        self.visible = 0
        self.where: slice | Tensor = slice(0, 0)
        self.filled: Tensor | None = None
        super().__init__(layers=[_SlotLayer(self) for _ in range(layers)])

    def place(self, positions: Tensor) -> None:
        """Announce the positions (B, n) of the tokens about to be fed: contiguous runs, position 0 may be repeated first."""
        first, last = int(positions.min()), int(positions.max())
        if last >= self.capacity:
            raise IndexError(f"position {last} lies outside a cache of {self.capacity} slots")
        uniform = last - first + 1 == positions.shape[1] and bool((positions[:, -1] == last).all())
        self.where = slice(first, last + 1) if uniform else positions
        self.visible, self.filled = last + 1, None

    def place_first(self, rows: Tensor, length: int) -> None:
        """Announce the first ``length`` tokens of some ``rows`` of the batch, which alone are about to be fed."""
        self.where, self.visible, self.filled = slice(0, length), length, rows

    def select(self, rows: Tensor) -> None:
        """Keep the given rows (indices into the batch), in that order."""
        self.batch = len(rows)
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]


class CachedModel:
    """A causal LM with its slot cache: tokens and positions in, logits out."""

    def __init__(self, model: PreTrainedModel, batch: int, capacity: int) -> None:
        check_supported(model.config)
        check_exact(model)
        self.model = model
        self.cache = SlotCache(model.config.num_hidden_layers, batch, capacity)
        self.slots = torch.arange(capacity, device=model.device)
        self.context = getattr(model.config, "max_position_embeddings", None) or capacity
        self.additive = model.config._attn_implementation == "eager"  # it adds its mask, sdpa reads a boolean one
        # transformers renames the argument; models move to the new name one by one.
        parameters = inspect.signature(type(model).forward).parameters
        self.argument = "cache" if "cache" in parameters else "past_key_values"

    def feed(self, tokens: Tensor, positions: Tensor, keep: int) -> Tensor:
        """Logits (B, keep, V) of the last ``keep`` of the tokens (B, n) placed at ``positions`` (B, n)."""
        self.cache.place(positions)
        mask = self.slots[: self.cache.visible] <= positions[:, None, :, None]  # (B, 1, n, visible)
        if self.additive:
            mask = torch.where(mask, 0.0, torch.finfo(self.model.dtype).min).to(self.model.dtype)
        return self._forward(tokens, positions, mask, keep)

    def prefill(self, tokens: Tensor, lengths: Tensor) -> None:
        """Fill the first ``lengths`` (B,) slots of each row from right-padded ``tokens`` (B, ≥ longest).

        Rows of similar length go together, few at a time: little padding, and what a layer computes stays in the
        processor's caches. What padding writes is overwritten later.
        """
        order = lengths.argsort()
        for rows in _groups(order, lengths[order].tolist()):
            length = int(lengths[rows[-1]])
            if length > 0:
                self.cache.place_first(rows, length)
                # Without a mask the model takes its causal path, which is what a first block needs.
                self._forward(tokens[rows, :length], self.slots[:length].expand(len(rows), -1), None, keep=1)

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, keep: int) -> Tensor:
        return self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions.clamp(max=self.context - 1),  # blocks may reach beyond a row's end, never its tokens
            use_cache=True,
            logits_to_keep=keep,
            **{self.argument: self.cache},
        ).logits


PREFILL_TOKENS = 2048  # fed at once, padding included


def _groups(order: Tensor, lengths: list[int]) -> list[Tensor]:
    """Split ``order``, rows sorted by the given ``lengths``, into groups of at most PREFILL_TOKENS padded tokens."""
    groups, first = [], 0
    for place in range(1, len(lengths) + 1):
        if place == len(lengths) or (place + 1 - first) * lengths[place] > PREFILL_TOKENS:
            groups.append(order[first:place])
            first = place
    return groups
