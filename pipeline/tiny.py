"""A tiny random Llama with a byte-level tokenizer, for tests and the smoke experiment. It knows nothing."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FORMAT = 1
SPECIAL = ("<|start|>", "<|end|>", "<|pad|>")
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make(folder: Path, seed: int) -> None:
    """Write model and tokenizer; the same seed writes the same weights."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    model_config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(model_config).save_pretrained(folder)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and the special ones."""
    symbols = list(SPECIAL) + sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    start, end, pad = SPECIAL
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=start, eos_token=end, pad_token=pad)
    tokenizer.chat_template = TEMPLATE
    return tokenizer
