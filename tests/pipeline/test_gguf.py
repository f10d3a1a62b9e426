"""A GGUF file read back by transformers is the draft, rounded and nothing else; its vocabulary keeps llama.cpp's rules."""

import copy
import json
from dataclasses import replace

import gguf
import pytest
import torch
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM

from pipeline import gguf_model, gguf_vocabulary
from pipeline.choices import Format, GgufType, Stage
from pipeline.errors import PipelineError
from pipeline.gguf_vocabulary import CASELESS, TAIL, build, incompatibility, padded, read
from pipeline.tiny import byte_tokenizer
from tests.pipeline.conftest import write_gguf
from tests.pipeline.exported import config_of, finished, in_this_process, model_of
from tests.pipeline.test_export import exported, stage_folder

IDS = torch.tensor([[7, 3, 49, 0, 21, 21, 8, 200]])


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


def written(path, model, kind=GgufType.f32, vocabulary=None):
    vocabulary = padded(build(byte_tokenizer()), model.config.vocab_size) if vocabulary is None else vocabulary
    gguf_model.write(model, vocabulary, kind, "Entwurf für x", path)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", list(GgufType), ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_what_is_read_back_is_the_draft_rounded(tmp_path, family, kind):
    model = model_of(config_of(family, tied=False, rows=264))
    found = logits(written(tmp_path / "a.gguf", model, kind))
    rounded = copy.deepcopy(model)
    gguf_model.round_weights(rounded, kind)
    torch.testing.assert_close(found, logits(rounded), atol=1e-5, rtol=0)
    error = float((found - logits(model)).abs().max() / logits(model).abs().max())
    assert error <= {GgufType.f32: 1e-6, GgufType.f16: 0.01, GgufType.bf16: 0.08, GgufType.q8_0: 0.08}[kind]
    assert kind is GgufType.f32 or error > 0


def test_llama_rows_in_the_wrong_order_would_be_noticed(tmp_path, monkeypatch):
    model = model_of(config_of("llama", tied=False))
    monkeypatch.setattr(gguf_model, "interleaved", lambda rows, heads: rows)
    assert float((logits(written(tmp_path / "a.gguf", model)) - logits(model)).abs().max()) > 0.01


def test_interleaving_by_hand():
    rows = torch.arange(8.0)[:, None]  # two heads of width four
    assert gguf_model.interleaved(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("shape", "kind", "stored"),
    [
        ((64,), GgufType.q8_0, "F32"),
        ((3, 48), GgufType.q8_0, "F16"),
        ((3, 64), GgufType.q8_0, "Q8_0"),
        ((3, 48), GgufType.bf16, "BF16"),
    ],
)
def test_the_format_of_a_tensor(shape, kind, stored):
    assert gguf_model.kind_of(torch.zeros(shape), kind).name == stored


def test_rounding_to_bf16_is_that_of_torch():
    model = model_of(config_of("llama", tied=False))
    rounded = copy.deepcopy(model)
    gguf_model.round_weights(rounded, GgufType.bf16)
    before, after = (m.model.layers[0].mlp.up_proj.weight for m in (model, rounded))
    assert torch.equal(after, before.to(torch.bfloat16).float())


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("gpt2", {}, "gpt2 models are not written as GGUF, only llama, qwen2, qwen3"),
        ("llama", {"attention_bias": True}, "llama with biases"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "llama with rope_type=linear",
        ),
        ("qwen3", {"head_dim": 64}, "qwen3 with head_dim=64"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(family, change, said):
    config = config_of(family)
    for key, value in change.items():
        setattr(config, key, value)
    with pytest.raises(PipelineError, match=f"^export\\.format=gguf: {said}"):
        gguf_model.check_family(config)


def test_the_vocabulary_that_is_built():
    tokenizer = byte_tokenizer()
    vocabulary = build(tokenizer)
    assert vocabulary.tokens == tokenizer.convert_ids_to_tokens(range(259))
    assert vocabulary.types[:4] == [3, 3, 3, 1]  # three control tokens, then bytes
    assert [vocabulary.field(f"{name}_token_id") for name in ("bos", "eos", "padding")] == [0, 1, 2]
    assert (vocabulary.field("add_bos_token"), vocabulary.field("add_eos_token")) == (False, False)
    assert (vocabulary.field("model"), vocabulary.field("pre")) == ("gpt2", "gpt-2")
    assert vocabulary.fields["tokenizer.chat_template"][0] == tokenizer.chat_template


def test_rows_without_a_token_are_unused():
    vocabulary = padded(build(byte_tokenizer()), 262)
    assert vocabulary.tokens[259:] == ["[PAD259]", "[PAD260]", "[PAD261]"]
    assert vocabulary.types[258:] == [1, 5, 5, 5]
    with pytest.raises(PipelineError, match="259 tokens, the head 200 rows"):
        padded(build(byte_tokenizer()), 200)


def split_by(pattern):
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


digits = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=False), "gpt-2"),
        (digits, "smollm"),
        (split_by(CASELESS + r"\p{N}" + TAIL), "qwen2"),
        (split_by(CASELESS + r"\p{N}{1,3}" + TAIL), "llama-bpe"),
    ],
)
def test_ways_of_splitting_that_llama_cpp_knows(steps, name):
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = steps
    assert build(tokenizer).field("pre") == name


@pytest.mark.parametrize("steps", [split_by(r"\d+"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
def test_a_way_of_splitting_without_a_name_is_refused(steps):
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = steps
    with pytest.raises(PipelineError, match=r"splits text in a way that llama\.cpp has no known name for"):
        build(tokenizer)


def test_a_tokenizer_that_changes_text_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(PipelineError, match="has no known name for"):
        build(tokenizer)


def test_a_tokenizer_without_an_end_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(PipelineError, match="names no end-of-sequence token"):
        build(tokenizer)


def test_what_is_written_is_read_back(tmp_path):
    model = model_of(config_of("llama", tied=False, rows=264))
    vocabulary = replace(padded(build(byte_tokenizer()), 264), merges=["a b", "Ġ a"])
    written(tmp_path / "a.gguf", model, vocabulary=vocabulary)
    assert read(tmp_path / "a.gguf") == vocabulary


def test_the_targets_own_file_gives_the_vocabulary(tmp_path):
    own = read(write_gguf(tmp_path / "target.gguf"))
    assert own.merges == ["a b"]
    assert own.tokens[-1] == "ab"
    model = model_of(config_of("llama", tied=False, rows=260))
    written(tmp_path / "a.gguf", model, vocabulary=own)
    assert incompatibility(own, read(tmp_path / "a.gguf")) is None
    assert read(tmp_path / "a.gguf") == own


def changed(vocabulary, **fields):
    stored = {f"tokenizer.ggml.{key}": (value, gguf.GGUFValueType.UINT32, None) for key, value in fields.items()}
    return replace(vocabulary, fields=vocabulary.fields | stored)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda v: changed(v, model="llama"), "model is gpt2 in the target and llama"),
        (lambda v: changed(v, bos_token_id=4), "bos_token_id is 0 in the target and 4"),
        (lambda v: changed(v, eos_token_id=4), "eos_token_id is 1"),
        (lambda v: changed(v, add_bos_token=True), "add_bos_token is False"),
        (lambda v: changed(v, add_eos_token=True), "add_eos_token is False"),
        (lambda v: padded(v, 259 + 129), "the target has 259 tokens and the draft 388, more than 128"),
        (lambda v: replace(v, tokens=[*v.tokens[:5], "x", *v.tokens[6:]]), "id 5 is"),
        (lambda v: replace(v, tokens=[*v.tokens[:4], "x", *v.tokens[5:]]), None),
        (lambda v: padded(v, 259 + 128), None),
    ],
)
def test_the_rules_of_llama_cpp(change, said):
    target = build(byte_tokenizer())
    found = incompatibility(target, change(target))
    assert found is None if said is None else found.startswith(said)


@pytest.mark.parametrize("kind", list(GgufType), ids=lambda kind: kind.name)
def test_the_stage_checks_the_file_it_wrote(tmp_path, monkeypatch, kind):
    in_this_process(monkeypatch)
    context = finished(tmp_path, "llama", format=Format.gguf, gguf_type=kind)
    _, details = exported(context)
    place = stage_folder(context) / "draft"
    assert details["gguf"]["largest_logit_difference"] <= 1e-4
    assert details["gguf"]["excluded_mass"] < 1e-3
    assert {path.name for path in place.iterdir()} == {"draft.gguf", "README.md", "serve.md", "gate.json", "provenance.json"}
    assert json.loads((place / "provenance.json").read_text())["files"] == {"gguf": "draft.gguf"}


def test_the_stage_refuses_rows_in_the_wrong_order(tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    monkeypatch.setattr(gguf_model, "interleaved", lambda rows, heads: rows)
    context = finished(tmp_path, "llama", format=Format.both, path=str(tmp_path / "out"))
    with pytest.raises(PipelineError, match=r"\(gguf\), read by plain transformers, give logits that differ"):
        exported(context)
    assert not (tmp_path / "out").exists()


def test_the_stage_refuses_a_vocabulary_that_llama_cpp_would(tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    add = gguf_vocabulary.add_vocabulary
    monkeypatch.setattr(gguf_model, "add_vocabulary", lambda writer, v: add(writer, changed(v, eos_token_id=9)))
    context = finished(tmp_path, "llama", format=Format.gguf)
    with pytest.raises(PipelineError, match=r"llama\.cpp would not let this draft serve its target .eos_token_id is 1"):
        exported(context)
    assert Stage.export not in context.artifacts
