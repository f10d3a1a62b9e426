"""A target that transformers has spread over devices stays where it is, and says what it says on one device."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.config import Target
from pipeline.target import TargetFiles, resolve
from tests.pipeline.conftest import SMOKE, digest, only


def files(work) -> dict[str, str]:
    return {name: found for name, found in digest(only(work / "artifacts" / "logits")).items() if name.endswith("tensors")}


@pytest.mark.parametrize("spread", ["auto", "disk"])
def test_the_cache_is_the_same(work, tmp_path, attempt, monkeypatch, spread):
    states = ("stages=[generate,logits]", "generate.keep_states=false", "generate.max_new_tokens=4", "generate.batch_size=64")
    for name in ("generate", "logits"):
        shutil.rmtree(work / "artifacts" / name)
    assert attempt(SMOKE, *states, work=work)[0] == 0
    before = files(work)
    for name in ("generate", "logits"):
        shutil.rmtree(work / "artifacts" / name)
    plain, loaded = TargetFiles.load, []

    def load(self, dtype):
        loaded.append(plain(self, dtype) if spread == "auto" else on_disk(self, dtype, tmp_path / "offload"))
        return loaded[-1]

    monkeypatch.setattr(TargetFiles, "load", load)
    code, stderr = attempt(SMOKE, *states, "target.device_map=auto", work=work)
    assert code == 0, stderr
    assert len(loaded) == 2  # one for each stage
    assert spread == "auto" or all("disk" in model.hf_device_map.values() for model in loaded)
    assert files(work) == before


def on_disk(files: TargetFiles, dtype: torch.dtype, folder):
    """Two of three layers of the target wait on the disk until they are needed."""
    layers = {f"model.layers.{number}": "disk" if number else "cpu" for number in range(3)}
    others = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    model = AutoModelForCausalLM.from_pretrained(
        files.folder, dtype=dtype, device_map=layers | others, offload_folder=folder, trust_remote_code=False
    ).eval()
    with pytest.raises(RuntimeError, match="offloaded"):  # so a move would be seen
        model.to("cpu")
    return model


def test_it_shapes_no_result(tmp_path):
    one, spread = (resolve(Target("random:tiny", device_map=given), tmp_path, 0) for given in (None, "auto"))
    assert one.fingerprint == spread.fingerprint
