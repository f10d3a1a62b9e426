"""A draft as a GGUF file: which families, under which tensor names, in which number formats.

llama.cpp rotates neighbouring numbers of a query or key head, transformers rotates the two halves of it, so a Llama's
q and k rows change places on the way (``interleaved``); Qwen's do not, because llama.cpp rotates their halves as well.
It knows no tokenizer: the vocabulary's metadata is given.
"""

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from pipeline.choices import GgufType
from pipeline.errors import PipelineError
from pipeline.gguf_vocabulary import Vocabulary, add_vocabulary

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
KINDS = {GgufType.f32: Kind.F32, GgufType.f16: Kind.F16, GgufType.bf16: Kind.BF16, GgufType.q8_0: Kind.Q8_0}
FILE_TYPES = {
    GgufType.f32: gguf.LlamaFileType.ALL_F32,
    GgufType.f16: gguf.LlamaFileType.MOSTLY_F16,
    GgufType.bf16: gguf.LlamaFileType.MOSTLY_BF16,
    GgufType.q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
}
BLOCK = 32  # numbers of a row that share a scale in q8_0
QWEN3_HEAD = 128  # the head width that transformers assumes of every Qwen3 file


def check_family(config: PreTrainedConfig) -> None:
    """Refuse, by name, what cannot be written, or not read back to be compared.

    Raises:
        PipelineError: another family, scaled positions, biases that Llama files do not carry, an odd head width.
    """
    name = config.model_type
    if name not in ARCHITECTURES:
        raise PipelineError(
            f"export.format=gguf: {name} models are not written as GGUF, only {', '.join(ARCHITECTURES)}; "
            "use export.format=transformers"
        )
    scaling = _rope(config).get("rope_type", "default")
    reason = None
    if scaling != "default":
        reason = f"rope_type={scaling}"
    elif getattr(config, "mlp_bias", False) or (name != "qwen2" and getattr(config, "attention_bias", False)):
        reason = "biases"
    elif name == "qwen3" and config.head_dim != QWEN3_HEAD:
        reason = f"head_dim={config.head_dim} (only {QWEN3_HEAD} is read back)"
    if reason:
        raise PipelineError(f"export.format=gguf: {name} with {reason} is not written; use export.format=transformers")


def write(model: PreTrainedModel, vocabulary: Vocabulary, kind: GgufType, name: str, path: Path) -> None:
    """Write weights and metadata of a model with one head row for each of the vocabulary's tokens."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    try:
        writer.add_type("model")
        writer.add_name(name)
        writer.add_file_type(FILE_TYPES[kind])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_shape(writer, config)
        add_vocabulary(writer, vocabulary)
        for tensor_name, tensor in tensors(model):
            stored = kind_of(tensor, kind)
            writer.add_tensor(tensor_name, gguf.quantize(tensor.numpy(), stored), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _add_shape(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(_rope(config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _rope(config: PreTrainedConfig) -> dict:
    return config.rope_parameters or {}


def tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The weights under llama.cpp's names, in its order of rows, float32."""
    config = model.config
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if written is None:
            raise PipelineError(f"export.format=gguf: {config.model_type} has a tensor that GGUF has no name for: {name}")
        tensor = tensor.detach().float().contiguous()
        if config.model_type == "llama" and ".q_proj." in name:
            tensor = interleaved(tensor, config.num_attention_heads)
        elif config.model_type == "llama" and ".k_proj." in name:
            tensor = interleaved(tensor, config.num_key_value_heads)
        yield written, tensor


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Rows (heads · d, width) of each head from the order 0 … d−1 to 0, d/2, 1, d/2 + 1, …"""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape).contiguous()


def kind_of(tensor: Tensor, kind: GgufType) -> Kind:
    """The format a tensor is stored in: vectors stay exact; rows that no block fits fall back to f16."""
    if tensor.ndim == 1:
        return Kind.F32
    if kind is GgufType.q8_0 and tensor.shape[-1] % BLOCK:
        return Kind.F16
    return KINDS[kind]


@torch.no_grad()
def round_weights(model: PreTrainedModel, kind: GgufType) -> None:
    """Round a model's weights in place as a file of this format would, without a file: what its reader must find."""
    for parameter in model.parameters():
        stored = kind_of(parameter, kind)
        numbers = gguf.dequantize(gguf.quantize(parameter.float().numpy(), stored), stored)
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(numbers)).reshape(parameter.shape))
