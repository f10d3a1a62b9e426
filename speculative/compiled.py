"""The forward of a few tokens as a compiled program: nothing of Python and no dispatch between its operations.

One program serves a model, however many tokens are fed and however much its cache holds, with the weights frozen into it in
a layout of the processor's own. Compiling takes a minute or two, less where torch finds what it compiled before. It knows
nothing of decoding. Prefill, batches and models that keep states run as they are.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from speculative.cache import CachedModel, tolerance
from speculative.packing import state_of
from speculative.slots import Stores, slot_by_slot

SLOTS = 32  # of the cache that a program is tried on


class NotCompiledError(ValueError):
    """A model that runs as it is, and why."""


def compiled(model: PreTrainedModel) -> PreTrainedModel:
    """Compile the forward of ``model`` for one row and few tokens, on the processor; returns ``model`` itself.

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
            # As an option of torch.compile it comes too late: whether weights are constants is asked while the model is traced.
            with torch._inductor.config.patch(freezing=True):
                found = _trial(model)
        except Exception as error:  # compilers fail in ways of their own
            model.program = None
            raise NotCompiledError(f"{kind}: it does not compile here ({_first_line(error)})") from error
    if not torch.allclose(found, expected, rtol=0, atol=tolerance(model.dtype) * float(expected.abs().max())):
        model.program = None
        raise NotCompiledError(f"{kind}: its compiled program gives other logits")
    return model


def _trial(model: PreTrainedModel) -> Tensor:
    """Logits after a prefill, of tokens fed one, two and three at once."""
    cached = CachedModel(model, 1, SLOTS)
    tokens = torch.arange(1, 10)[None] % model.config.vocab_size
    places = torch.arange(9)[None]
    cached.prefill(tokens, torch.tensor([3]))
    pieces = (slice(3, 4), slice(4, 6), slice(6, 9))
    return torch.cat([cached.feed(tokens[:, piece], places[:, piece], keep=3) for piece in pieces], 1)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


class Program:
    """The compiled forward of one model, as ``CachedModel`` calls it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.of = _state(model)
        self.run = torch.compile(_Step(model), fullgraph=True, isolate_recompiles=True)

    def __deepcopy__(self, memo: dict) -> None:
        return None  # a copy of the model has weights of its own

    def current(self, model: PreTrainedModel) -> bool:
        """Whether ``model`` has the weights that were compiled."""
        return self.of == _state(model)

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor, mask: Tensor, stores: Stores) -> Tensor:
        """Logits (1, n, V) of ``tokens`` (1, n) at ``positions`` (1, n), whose keys and values go into ``slots`` (n,).

        ``mask`` (1, 1, n, capacity) says which slots each token sees.
        """
        count = len(slots)
        # A program is for one layout: without dimensions of one, whose stride may be anything, and from a storage's begin.
        # So a single token is fed twice, into the same slot; a program for one row is not even faster.
        given = (tokens[0], positions[0], slots, mask[0, 0])
        tokens, positions, slots, mask = (torch.cat([one, one]) if count == 1 else one.clone() for one in given)
        for tensor, places in ((tokens, (0,)), (positions, (0,)), (slots, (0,)), (mask, (0, 1))):
            torch._dynamo.mark_dynamic(tensor, places)
        for store in (store for pair in stores for store in pair):
            if not hasattr(store, "_dynamo_dynamic_indices"):  # a store is told once
                torch._dynamo.mark_dynamic(store, 2)
        return self.run(tokens, positions, slots, mask, stores)[:, :count]


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
