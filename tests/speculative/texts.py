"""A byte-level tokenizer small enough to read, with tokens that cut words and characters."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SIGNS = pre_tokenizers.ByteLevel.alphabet()
WORDS = ["he", "ll", "hello", "Ġwor", "ld", "Ġworld", "stop", "st", "op", "END"]


def byte_level(words=tuple(WORDS), **special) -> PreTrainedTokenizerFast:
    """Every byte has an id, in a fixed order; ``words`` follow, then special tokens."""
    vocabulary = {sign: i for i, sign in enumerate([*sorted(SIGNS), *words])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def spell(tokenizer, *parts) -> list[int]:
    """Ids of the given vocabulary entries; bytes are spelled one by one."""
    vocabulary = tokenizer.get_vocab()
    signs = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = [list(signs.pre_tokenize_str(p.decode())[0][0]) if isinstance(p, bytes) else [p] for p in parts]
    return [vocabulary[entry] for entries in spelled for entry in entries]
