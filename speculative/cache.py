"""A key-value cache with one slot per position.

Slot = position: a rejected token's slot is overwritten when its position is fed again, and a query at position t sees
the slots ≤ t and nothing else. Only the nodes of a draft tree stand in slots that are not their positions, until the
path that was kept is moved. Rows of a batch may stand at different positions.
"""

from collections.abc import Callable, Sequence
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from speculative.slots import SlotCache, argument
from speculative.tree import Tree


class UnsupportedModelError(ValueError):
    """The model's cache cannot be rolled back by forgetting slots."""


def check_supported(config: PreTrainedConfig) -> None:
    """Refuse, by name, attention that does not keep one slot for every position."""
    # GPT-Neo has a word of its own, and keeps its window apart.
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "attention_layers", None) or ())}
    kinds -= {"full_attention", "global"}
    if kinds:
        raise UnsupportedModelError(f"{config.model_type}: layers of kind {sorted(kinds)} cannot be rolled back exactly")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise UnsupportedModelError(
            f"{config.model_type}: sliding_window={config.sliding_window} cannot be rolled back exactly"
        )
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{config.model_type}: only decoder-only models are supported")


_EXACT: WeakSet[PreTrainedModel] = WeakSet()  # models that passed check_exact
_BRANCHING: WeakSet[PreTrainedModel] = WeakSet()  # and check_branching
Trial = Callable[[PreTrainedModel, Tensor], tuple[Tensor, Tensor]]  # model, tokens (2, 8) → logits two ways


def check_exact(model: PreTrainedModel) -> None:
    """Refuse a model whose logits change when tokens are fed in pieces, in a batch, or over a forgotten slot.

    Not every architecture reads the mask and positions it is given; the few that do not are found by trying, once.
    """
    _try(model, _EXACT, _in_pieces, "its output depends on how tokens are fed; it is not supported")


def check_branching(model: PreTrainedModel) -> None:
    """Refuse a model that takes a token's slot for its position: to it the nodes of a tree stand in other places."""
    _try(model, _BRANCHING, _in_branches, "its output depends on where tokens stand in the cache; it cannot verify a tree")


def _try(model: PreTrainedModel, passed: WeakSet[PreTrainedModel], trial: Trial, reason: str) -> None:
    if model in passed:
        return
    passed.add(model)  # before the trial, which feeds the model itself
    try:
        with torch.inference_mode():
            tokens = torch.tensor([[1, 3, 2, 5, 4, 6, 2, 7], [4, 2, 2, 3, 1, 5, 7, 3]], device=model.device)
            found, whole = (logits.float() for logits in trial(model, tokens % model.config.vocab_size))
            if not bool(whole.isfinite().all()):
                raise ValueError("the model gives logits that are NaN or infinite")
        exact = torch.allclose(found, whole, rtol=0, atol=tolerance(model.dtype) * float(whole.abs().max()))
    except Exception as error:  # an architecture that is not what the cache expects fails in ways of its own
        passed.discard(model)
        raise UnsupportedModelError(f"{model.config.model_type}: its cache cannot be used ({error})") from error
    if not exact:
        passed.discard(model)
        raise UnsupportedModelError(f"{model.config.model_type}: {reason}")


def tolerance(dtype: torch.dtype) -> float:
    """How far the logits of two ways to compute the same may lie apart, as a share of the largest."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 5e-2


def _in_pieces(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Two tokens after a prefill, the rows at different places; and the same by one forward."""
    ends = torch.tensor([[6, 7], [2, 3]], device=model.device)
    row = torch.arange(2, device=model.device)
    whole = model(input_ids=tokens, use_cache=False).logits[row, ends[:, -1]]
    cached = CachedModel(model, 2, 10)
    cached.prefill(tokens.flip(1), ends[:, -1])  # to be overwritten
    cached.prefill(tokens, ends[:, 0])
    return cached.feed(tokens.gather(1, ends), ends, keep=1)[:, -1], whole


def _in_branches(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's last tokens as the second branch of a tree, kept, and one more fed; and the same by one forward."""
    ends = torch.tensor([6, 5], device=model.device)
    whole = model(input_ids=tokens, use_cache=False).logits
    cached = CachedModel(model, 2, 12)
    cached.prefill(tokens, ends - 3)
    anchors = (ends - 3)[:, None]
    path = torch.tensor([0, 2, 3], device=model.device)  # of a tree in which nodes 1 and 2 continue the anchor, 3 node 2
    last = tokens.gather(1, anchors + torch.arange(3, device=model.device))
    nodes = torch.stack([last[:, 0], last[:, 2], last[:, 1], last[:, 2]], 1)
    fed = cached.feed_nodes(nodes, anchors.squeeze(1), Tree((0, 0, 2)), range(4))[:, path]
    cached.cache.keep_path(path[1:].expand(2, -1), anchors.squeeze(1))
    after = cached.feed(tokens.gather(1, ends[:, None]), ends[:, None], keep=1)
    places = anchors + torch.arange(4, device=model.device)
    return torch.cat([fed, after], 1), whole[torch.arange(2, device=model.device)[:, None], places]


class CachedModel:
    """A causal LM with its slot cache: tokens and positions in, logits out."""

    def __init__(self, model: PreTrainedModel, batch: int, capacity: int) -> None:
        check_supported(model.config)
        check_exact(model)
        self.model = model
        program = getattr(model, "program", None)
        self.program = program if program is not None and program.current(model) else None
        self.cache = SlotCache(model.config.num_hidden_layers, batch, capacity)
        self.slots = torch.arange(capacity, device=model.device)
        self.context = getattr(model.config, "max_position_embeddings", None) or capacity
        self.additive = model.config._attn_implementation == "eager"  # it adds its mask, sdpa reads a boolean one
        self.argument = argument(model)
        self.keeps_states = False
        self.states: Tensor | None = None  # (B, n, width) that the head read in the last forward, if they are kept

    def feed(self, tokens: Tensor, positions: Tensor, keep: int) -> Tensor:
        """Logits (B, keep, V) of the last ``keep`` of the tokens (B, n) placed at ``positions`` (B, n)."""
        self.cache.place(positions)
        mask = self.slots[: self.cache.visible] <= positions[:, None, :, None]  # (B, 1, n, visible)
        return self._forward(tokens, positions, self._readable(mask), keep)

    def feed_nodes(self, tokens: Tensor, anchors: Tensor, tree: Tree, nodes: Sequence[int]) -> Tensor:
        """Logits (B, n, V) of some ``nodes`` of a tree, ``tokens`` (B, n), below the anchors at positions (B,).

        Node i stands in slot anchor + i, its position is anchor + depth. It sees what the anchor sees, its ancestors and
        itself; these must have been fed, or be fed now.
        """
        chosen = torch.tensor(nodes, device=tokens.device)
        depths = torch.tensor(tree.depths, device=tokens.device)
        self.cache.place(anchors[:, None] + chosen)
        offsets = self.slots[: self.cache.visible] - anchors[:, None]  # (B, visible)
        seen = tree.sees.to(tokens.device)[chosen][:, offsets.clamp(0, tree.size)].transpose(0, 1)  # (B, n, visible)
        mask = (offsets <= 0)[:, None] | (seen & (offsets <= tree.size)[:, None])
        return self._forward(tokens, anchors[:, None] + depths[chosen], self._readable(mask[:, None]), len(nodes))

    def _readable(self, mask: Tensor) -> Tensor:
        """A boolean mask as the model's attention reads it."""
        if self.additive:
            return torch.where(mask, 0.0, torch.finfo(self.model.dtype).min).to(self.model.dtype)
        return mask

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
        if not self.keeps_states:
            return self._logits(tokens, positions, mask, keep)
        hook = self.model.get_output_embeddings().register_forward_pre_hook(self._note)
        try:
            return self._logits(tokens, positions, mask, keep)
        finally:
            hook.remove()

    def _note(self, head: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.states = inputs[0]

    def _logits(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, keep: int) -> Tensor:
        positions = positions.clamp(max=self.context - 1)  # blocks may reach beyond a row's end, never its tokens
        few = len(tokens) == 1 and tokens.shape[1] <= WIDEST and mask is not None and not self.keeps_states
        stores = self.cache.stores() if self.program is not None and few else []
        if stores:
            unseen = self.cache.capacity - mask.shape[-1]
            mask = torch.nn.functional.pad(mask, (0, unseen), value=torch.finfo(mask.dtype).min if self.additive else False)
            return self.program(tokens, positions, self.cache.written(), mask, stores)[:, -keep:]
        return self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=keep,
            **{self.argument: self.cache},
        ).logits


PREFILL_TOKENS = 2048  # fed at once, padding included
WIDEST = 32  # tokens that are given to a compiled program, which computes the logits of each


def _groups(order: Tensor, lengths: list[int]) -> list[Tensor]:
    """Split ``order``, rows sorted by the given ``lengths``, into groups of at most PREFILL_TOKENS padded tokens."""
    groups, first = [], 0
    for place in range(1, len(lengths) + 1):
        if place == len(lengths) or (place + 1 - first) * lengths[place] > PREFILL_TOKENS:
            groups.append(order[first:place])
            first = place
    return groups
