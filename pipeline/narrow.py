"""A draft narrower than its target: new layers on the target's embedding, seen through its strongest directions.

The directions are the leading principal axes of the embedding, which lose least of it (Eckart & Young, 1936). Heads keep
their size, so there are fewer of them. What is built is a stock model of the target's own architecture.
"""

import copy

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from pipeline.errors import PipelineError
from speculative import Draft


@torch.no_grad()
def build(source: PreTrainedModel, width: int, layers: int, vocabulary: Tensor | None, seed: int) -> Draft:
    """A float32 draft of ``layers`` new layers of ``width``, begun from ``seed``; its head is the source's, projected.

    Raises:
        PipelineError: a width that whole heads do not fill, or an architecture that has no heads to count.
    """
    config = _config(source.config, width, layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        made = torch.nn.Linear(width, source.config.vocab_size if vocabulary is None else len(vocabulary), bias=False)
    lookup, head = source.get_input_embeddings().weight.float(), source.get_output_embeddings().weight.float()
    axes = principal_axes(lookup, width)
    model.get_input_embeddings().weight.copy_(lookup @ axes)
    made.weight.copy_((head if vocabulary is None else head[vocabulary]) @ axes)
    model.set_output_embeddings(made)
    return Draft(model.eval(), vocabulary)


def principal_axes(rows: Tensor, count: int) -> Tensor:
    """The ``count`` orthonormal directions (d, count) along which ``rows`` (V, d) are longest."""
    wide = rows.double()
    return torch.linalg.eigh(wide.T @ wide).eigenvectors[:, -count:].flip(1).to(rows.dtype)


def _config(source: PretrainedConfig, width: int, layers: int) -> PretrainedConfig:
    missing = [key for key in ("hidden_size", "intermediate_size", "num_key_value_heads") if not hasattr(source, key)]
    if missing:
        raise PipelineError(f"draft.width={width}: {source.model_type} has no {missing[0]}; set draft.width=null")
    size = getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads
    shared = source.num_attention_heads // source.num_key_value_heads
    if width % (size * shared) or not 0 < width < source.hidden_size:
        raise PipelineError(
            f"draft.width={width}: give a multiple of {size * shared} (heads of {size}, {shared} to a key) below "
            f"{source.hidden_size}, or null for the target's own layers"
        )
    config = copy.deepcopy(source)
    for key, value in config.to_dict().items():  # layer_types and other lists with an entry for each layer
        if isinstance(value, list) and len(value) == source.num_hidden_layers:
            setattr(config, key, [value[layer % len(value)] for layer in range(layers)])
    config.intermediate_size = width * source.intermediate_size // source.hidden_size
    config.num_attention_heads, config.num_key_value_heads = width // size, width // size // shared
    config.hidden_size, config.num_hidden_layers, config.head_dim = width, layers, size
    config.tie_word_embeddings, config.dtype = False, torch.float32
    return config
