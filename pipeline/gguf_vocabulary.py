"""The vocabulary of a GGUF file: taken over from the target's own file, or built from its fast tokenizer.

Only byte-level BPE is built, and only with a way of splitting text that llama.cpp knows by name: a wrong name raises no
error there and splits text otherwise than the target does. It holds llama.cpp's rules for a draft beside a target.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
from transformers import PreTrainedTokenizerBase

from pipeline.errors import PipelineError

LARGEST_DIFFERENCE = 128  # tokens by which llama.cpp lets two vocabularies differ
FIRST_COMPARED = 5  # ids below it are not compared there
CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {CASELESS + r"\p{N}" + TAIL: "qwen2", CASELESS + r"\p{N}{1,3}" + TAIL: "llama-bpe"}
_PREFIX = "tokenizer."
_LIST, _TYPES, _MERGES = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges"))


@dataclass(frozen=True)
class Vocabulary:
    """``tokens`` and their ``types`` by id, BPE ``merges``, and every other field of the file's tokenizer by key.

    ``fields`` holds (value, value type, element type or None), as the file stores them.
    """

    tokens: list[str]
    types: list[int]
    merges: list[str]
    fields: dict[str, tuple[Any, gguf.GGUFValueType, gguf.GGUFValueType | None]]

    def field(self, name: str) -> Any:
        """The value of ``tokenizer.ggml.NAME``, None where the file has none."""
        found = self.fields.get(f"tokenizer.ggml.{name}")
        return None if found is None else found[0]


def read(path: Path) -> Vocabulary:
    """The vocabulary of a GGUF file."""
    fields = {}
    for key, field in gguf.GGUFReader(path).fields.items():
        if key.startswith(_PREFIX):
            array = field.types[0] is gguf.GGUFValueType.ARRAY
            fields[key] = (field.contents(), field.types[0], field.types[-1] if array else None)
    lists = [list(fields.pop(key, ([],))[0]) for key in (_LIST, _TYPES, _MERGES)]
    return Vocabulary(*lists, fields)


def padded(vocabulary: Vocabulary, rows: int) -> Vocabulary:
    """As many tokens as the head has rows; those past the tokenizer's stand for nothing.

    Raises:
        PipelineError: there are more tokens than rows.
    """
    missing = rows - len(vocabulary.tokens)
    if missing < 0:
        raise PipelineError(f"export.format=gguf: the tokenizer has {len(vocabulary.tokens)} tokens, the head {rows} rows")
    names = [f"[PAD{i}]" for i in range(rows - missing, rows)]
    types = vocabulary.types or [gguf.TokenType.NORMAL.value] * len(vocabulary.tokens)
    unused = [gguf.TokenType.UNUSED.value] * missing
    return replace(vocabulary, tokens=vocabulary.tokens + names, types=types + unused)


def build(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    """The vocabulary of a byte-level BPE tokenizer.

    Raises:
        PipelineError: another kind of tokenizer, an unknown way of splitting, or no end-of-sequence token.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    inner = json.loads(backend.to_str()) if backend is not None else {"model": {"type": type(tokenizer).__name__}}
    pre = split_name(inner)
    if tokenizer.eos_token_id is None:
        raise PipelineError("export.format=gguf: the tokenizer names no end-of-sequence token; set one in its files")
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    tokens, types = [], []
    for number in range(max(names) + 1):
        tokens.append(names.get(number, f"[PAD{number}]"))
        types.append(_type(tokenizer, number if number in names else None).value)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in inner["model"]["merges"]]
    return Vocabulary(tokens, types, merges, _fields(tokenizer, pre))


def _type(tokenizer: PreTrainedTokenizerBase, number: int | None) -> gguf.TokenType:
    if number is None:
        return gguf.TokenType.UNUSED
    added = tokenizer.added_tokens_decoder.get(number)
    if added is None:
        return gguf.TokenType.NORMAL
    return gguf.TokenType.CONTROL if added.special else gguf.TokenType.USER_DEFINED


def _fields(tokenizer: PreTrainedTokenizerBase, pre: str) -> dict[str, tuple[Any, Any, None]]:
    text, number, flag = gguf.GGUFValueType.STRING, gguf.GGUFValueType.UINT32, gguf.GGUFValueType.BOOL
    encoded = tokenizer("a")["input_ids"]
    fields = {
        "tokenizer.ggml.model": ("gpt2", text, None),
        "tokenizer.ggml.pre": (pre, text, None),
        "tokenizer.ggml.add_bos_token": (encoded[0] == tokenizer.bos_token_id, flag, None),
        "tokenizer.ggml.add_eos_token": (encoded[-1] == tokenizer.eos_token_id, flag, None),
    }
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    ids |= {"unknown": tokenizer.unk_token_id, "padding": tokenizer.pad_token_id}
    fields |= {f"tokenizer.ggml.{name}_token_id": (i, number, None) for name, i in ids.items() if i is not None}
    if isinstance(tokenizer.chat_template, str):
        fields["tokenizer.chat_template"] = (tokenizer.chat_template, text, None)
    return fields


def split_name(inner: dict[str, Any]) -> str:
    """llama.cpp's name for the way a tokenizer (as tokenizer.json has it) splits text before BPE.

    Raises:
        PipelineError: it is no byte-level BPE, it normalises text, or it splits in a way without a name.
    """
    kind = inner["model"]["type"]
    steps = inner.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    if kind != "BPE" or not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        raise PipelineError(
            f"export.format=gguf: the target's tokenizer ({kind}) is no byte-level BPE, the only kind that is written; "
            "give a target that is a GGUF file, or use export.format=transformers"
        )
    *before, last = steps
    found = None
    if not before and last.get("use_regex", True):
        found = "gpt-2"
    elif len(before) == 1 and before[0].get("type") == "Digits" and before[0].get("individual_digits"):
        found = "smollm" if last.get("use_regex", True) else None
    elif len(before) == 1 and before[0].get("type") == "Split" and not last.get("use_regex", True):
        found = SPLITS.get(before[0]["pattern"].get("Regex"))
    if (inner.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
        found = None
    if found is None:
        raise PipelineError(
            "export.format=gguf: the target's tokenizer splits text in a way that llama.cpp has no known name for; "
            "give a target that is a GGUF file, or use export.format=transformers"
        )
    return found


def add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    """Add the vocabulary's fields to a file that is being written."""
    for key, (value, kind, element) in vocabulary.fields.items():
        writer.add_key_value(key, value, kind, element)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)


def incompatibility(target: Vocabulary, draft: Vocabulary) -> str | None:
    """Why llama.cpp would not let one draft for the other (its ``common_speculative_are_compatible``), or None."""
    for name in ("model", "add_bos_token", "add_eos_token", "bos_token_id", "eos_token_id"):
        ours, theirs = target.field(name), draft.field(name)
        if ours != theirs:
            return f"{name} is {ours} in the target and {theirs} in the draft"
    sizes = len(target.tokens), len(draft.tokens)
    if abs(sizes[0] - sizes[1]) > LARGEST_DIFFERENCE:
        return f"the target has {sizes[0]} tokens and the draft {sizes[1]}, more than {LARGEST_DIFFERENCE} apart"
    for number in range(FIRST_COMPARED, min(sizes)):
        if target.tokens[number] != draft.tokens[number]:
            return f"id {number} is {target.tokens[number]!r} in the target and {draft.tokens[number]!r} in the draft"
    return None
