"""Forwards of a few tokens as compiled programs: nothing of Python and no dispatch between their operations.

Two programs serve a model, one a single token and one any number of them, both whatever the cache holds. Weights are frozen
into them in a layout of the processor's own. Compiling takes minutes, less where torch finds what it compiled before. They
know nothing of decoding; prefill, batches and models that keep states run as they are.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from speculative.cache import CachedModel
from speculative.packing import state_of
from speculative.slots import Stores, slot_by_slot

SLOTS = 32  # of the cache that programs are tried on
TOLERANCE = 1e-3  # of the largest logit, between a program and the model as it is


class NotCompiledError(ValueError):
    """A model that runs as it is, and why."""


def compiled(model: PreTrainedModel) -> PreTrainedModel:
    """Compile the forwards of ``model`` for one row and few tokens, on the processor; returns ``model`` itself.

    Decoding uses the programs from then on. They are of the weights as they are now, of which they keep copies: a model
    whose weights are changed afterwards, moved or trained, runs as if it had not been compiled.

    Raises:
        NotCompiledError: it does not compile here, or its programs compute something else.
    """
    kind = model.config.model_type
    if model.device.type != "cpu":
        raise NotCompiledError(f"{kind}: programs are for the processor, the model is on {model.device}")
    model.programs = None
    with torch.inference_mode():
        expected = _trial(model)
        model.programs = Programs(model)
        try:
            found = _trial(model)
        except Exception as error:  # compilers fail in ways of their own
            model.programs = None
            raise NotCompiledError(f"{kind}: it does not compile here ({_first_line(error)})") from error
    if not torch.allclose(found, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max())):
        model.programs = None
        raise NotCompiledError(f"{kind}: its compiled programs give other logits")
    return model


def _trial(model: PreTrainedModel) -> Tensor:
    """Logits after a prefill, of tokens fed one, two and three at once."""
    cached = CachedModel(model, 1, SLOTS)
    tokens = torch.arange(1, 10)[None] % model.config.vocab_size
    places = torch.arange(9)[None]
    cached.prefill(tokens, torch.tensor([3]))
    pieces = (slice(3, 4), slice(4, 6), slice(6, 9))
    return torch.cat([cached.feed(tokens[:, piece], places[:, piece], keep=9) for piece in pieces], 1)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


class Programs:
    """The compiled forwards of one model, as ``CachedModel`` calls them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.of = _state(model)
        self.run = torch.compile(_Step(model), fullgraph=True, options={"freezing": True}, isolate_recompiles=True)

    def __deepcopy__(self, memo: dict) -> None:
        return None  # a copy of the model has weights of its own

    def current(self, model: PreTrainedModel) -> bool:
        """Whether ``model`` has the weights that were compiled."""
        return self.of == _state(model)

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor, mask: Tensor, stores: Stores) -> Tensor:
        """Logits (1, n, V) of ``tokens`` (1, n) at ``positions`` (1, n), whose keys and values go into ``slots`` (n,).

        ``mask`` (1, 1, n, capacity) says which slots each token sees.
        """
        several = tokens.shape[1] > 1
        # Programs are for one layout: without a dimension of one, whose stride may be anything, and from a storage's begin.
        tokens, positions, slots, mask = (given.clone() for given in (tokens[0], positions[0], slots, mask[0, 0]))
        _vary(mask, (0, 1) if several else (1,))
        for store in (store for pair in stores for store in pair):
            _vary(store, (2,))
        if several:
            for tensor in (tokens, positions, slots):
                _vary(tensor, (0,))
        return self.run(tokens, positions, slots, mask, stores)


def _vary(tensor: Tensor, places: tuple[int, ...]) -> None:
    """Tell the compiler that these sizes differ from call to call; a store is told once."""
    if not hasattr(tensor, "_dynamo_dynamic_indices"):
        torch._dynamo.mark_dynamic(tensor, places)


def _state(model: PreTrainedModel) -> list[tuple]:
    return [state_of(weight) for weight in model.parameters()]


class _Step(nn.Module):
    """The model's forward with the contents of its cache as plain tensors."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, mask: Tensor, stores: Stores) -> Tensor:
        places = {"attention_mask": mask[None, None], "position_ids": positions[None]}
        cache = slot_by_slot(self.model, stores, slots)
        return self.model(input_ids=tokens[None], use_cache=True, **places, **cache).logits
