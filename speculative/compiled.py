"""The forward of one token as a compiled program: nothing of Python and no dispatch between its operations.

One program serves a model, however much its cache holds, with the weights frozen into it. Compiling takes minutes, less where
torch finds what it compiled before. It knows nothing of decoding. Prefill, blocks of several tokens, batches and models that
keep states run as they are: what torch compiles for several rows is slower than their products with packed weights.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from speculative.cache import CachedModel
from speculative.packing import state_of
from speculative.slots import Stores, slot_by_slot

SLOTS = 32  # of the cache that a program is tried on
TOLERANCE = 1e-3  # of the largest logit, between the program and the model as it is


class NotCompiledError(ValueError):
    """A model that runs as it is, and why."""


def compiled(model: PreTrainedModel) -> PreTrainedModel:
    """Compile the forward of ``model`` for one row and one token, on the processor; returns ``model`` itself.

    Decoding uses the program from then on. It is of the weights as they are now, of which it keeps a copy: a model whose
    weights are changed afterwards, moved or trained, runs as if it had not been compiled.

    Raises:
        NotCompiledError: it does not compile here, or its program computes something else.
    """
    kind = model.config.model_type
    if model.device.type != "cpu":
        raise NotCompiledError(f"{kind}: programs are for the processor, the model is on {model.device}")
    model.program = None
    with torch.inference_mode():
        expected = _trial(model)
        model.program = Program(model)
        try:
            found = _trial(model)
        except Exception as error:  # compilers fail in ways of their own
            model.program = None
            raise NotCompiledError(f"{kind}: it does not compile here ({_first_line(error)})") from error
    if not torch.allclose(found, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max())):
        model.program = None
        raise NotCompiledError(f"{kind}: its compiled program gives other logits")
    return model


def _trial(model: PreTrainedModel) -> Tensor:
    """Logits after a prefill, of three tokens fed one by one."""
    cached = CachedModel(model, 1, SLOTS)
    tokens = torch.arange(1, 7)[None] % model.config.vocab_size
    places = torch.arange(6)[None]
    cached.prefill(tokens, torch.tensor([3]))
    return torch.cat([cached.feed(tokens[:, at : at + 1], places[:, at : at + 1], keep=1) for at in range(3, 6)], 1)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


class Program:
    """The compiled forward of one model, as ``CachedModel`` calls it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.of = _state(model)
        self.run = torch.compile(_Step(model), fullgraph=True, options={"freezing": True}, isolate_recompiles=True)

    def __deepcopy__(self, memo: dict) -> None:
        return None  # a copy of the model has weights of its own

    def current(self, model: PreTrainedModel) -> bool:
        """Whether ``model`` has the weights that were compiled."""
        return self.of == _state(model)

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor, mask: Tensor, stores: Stores) -> Tensor:
        """Logits (1, 1, V) of the token (1, 1) at its position (1, 1), whose keys and values go into ``slots`` (1,).

        ``mask`` (1, 1, 1, capacity) says which slots it sees.
        """
        # A program is for one layout: without dimensions of one, whose stride may be anything, and from a storage's begin.
        tokens, positions, slots, mask = (given.clone() for given in (tokens[0], positions[0], slots, mask[0, 0, 0]))
        _vary(mask, 0)
        for keys, values in stores:
            _vary(keys, 2)
            _vary(values, 2)
        return self.run(tokens, positions, slots, mask, stores)


def _vary(tensor: Tensor, place: int) -> None:
    """Tell the compiler that this size differs from call to call; a store is told once."""
    if not hasattr(tensor, "_dynamo_dynamic_indices"):
        torch._dynamo.mark_dynamic(tensor, place)


def _state(model: PreTrainedModel) -> list[tuple]:
    return [state_of(weight) for weight in model.parameters()]


class _Step(nn.Module):
    """The model's forward with the contents of its cache as plain tensors."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, mask: Tensor, stores: Stores) -> Tensor:
        places = {"attention_mask": mask[None, None, None], "position_ids": positions[None]}
        cache = slot_by_slot(self.model, stores, slots)
        return self.model(input_ids=tokens[None], use_cache=True, **places, **cache).logits
