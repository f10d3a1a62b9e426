"""A pair that someone brings is measured as it is, from one command and an empty folder; nothing of it is trained."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from data.responses import read_shards
from pipeline import existing, speculate, tiny
from pipeline.config import Config, Draft, Stage
from pipeline.route import ancestors
from tests.pipeline.conftest import SMOKE, only

SHORT = "corpus.train=4 corpus.validation=2 corpus.test=4 decoding.max_new_tokens=16"
COMMAND = (SMOKE, "stages=[speculate,report]", "decoding.baselines=false", "decoding.lossless_tokens=6", *SHORT.split())
GREEDY = ("generate.temperatures=[0.0]", "generate.shares=[1.0]", "decoding.temperatures=[0.0]")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target, a draft that is its twin, and a draft that shares its tokenizer alone."""
    root = tmp_path_factory.mktemp("pair")
    tiny.make(root / "target", seed=0)
    shutil.copytree(root / "target", root / "twin")
    tiny.make(root / "stranger", seed=1)
    return root


@pytest.fixture
def brought(pair, prompts):
    """Overrides of the command for one draft of the pair."""

    def overrides(draft: str, *more: str) -> list[str]:
        places = [f"target.path={pair / 'target'}", f"draft.path={pair / draft}", "corpus=dataset", f"corpus.path={prompts}"]
        return [*COMMAND, *places, *more]

    return overrides


def details(work, stage):
    return json.loads((only(work / "artifacts" / stage) / "manifest.json").read_text())["details"]


def test_a_twin_of_the_target_agrees_with_it_everywhere(tmp_path, attempt, brought, pair, monkeypatch):
    work = tmp_path / "work"
    monkeypatch.setattr(speculate, "best_length", lambda *_: pytest.fail("K is given, no text need be read for it"))
    code, stderr = attempt(*brought("twin", "decoding.draft_tokens=2"), work=work)
    assert code == 0, stderr
    stages = {path.name for path in (work / "artifacts").iterdir()}
    assert stages == {"corpus", "generate", "distil", "calibrate", "speculate", "report"}
    found = details(work, "speculate")
    for entry in found["by_temperature"].values():
        assert entry["after"]["overlap"] == pytest.approx(1, abs=1e-5)
        assert entry["after"]["top1"] == 1
        assert entry["draft_tokens"] == 2
        assert entry["before"] is None, "decoding.baselines=false compares with nothing"
    assert found["by_temperature"]["0"]["acceptance_rate"] == 1
    assert found["lossless"]["different"] == 0
    assert {one.request.split for one in read_shards(only(work / "artifacts" / "generate"))} == {"validation", "test"}
    saved = load_file(only(work / "artifacts" / "distil") / "draft" / "draft.safetensors")
    twin = AutoModelForCausalLM.from_pretrained(pair / "twin", dtype=torch.float32).state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in twin.items())
    told = (only(work / "artifacts" / "report") / "report.md").read_text()
    assert "| training | none: measured as it is |" in told
    assert "overlap 1.000, top-1 1.000  (" in told


def test_a_stranger_with_the_same_tokenizer_agrees_less_and_is_lossless_too(tmp_path, attempt, brought):
    work = tmp_path / "work"
    overrides = brought("stranger", *GREEDY)
    code, stderr = attempt(*overrides, work=work)
    assert code == 0, stderr
    found = details(work, "speculate")
    assert all(entry["after"]["overlap"] < 0.99 for entry in found["by_temperature"].values())
    assert found["lossless"]["different"] == 0
    again = attempt(*overrides, work=work)
    assert again[0] == 0
    assert details(work, "speculate") == found


def test_training_it_is_another_result(tmp_path, refused, brought):
    message = refused(*brought("twin", "stages=[distil,speculate]"), work=tmp_path / "work")
    assert "stages: corpus is needed" in message


def test_a_draft_of_another_tokenizer_is_refused(tmp_path, refused, brought, pair):
    odd = tmp_path / "odd"
    shutil.copytree(pair / "twin", odd)
    text = (odd / "tokenizer.json").read_text()
    swapped = text.replace('"!":', '"\x00":').replace('"\\"":', '"!":').replace('"\x00":', '"\\"":')
    assert swapped != text
    (odd / "tokenizer.json").write_text(swapped)
    message = refused(*brought("twin", f"draft.path={odd}"), work=tmp_path / "work")
    assert f"draft.path={odd}: its tokenizer is not the target's" in message
    assert not (tmp_path / "work" / "artifacts").exists()  # before anything long begins


def test_a_draft_that_is_not_there_is_refused(tmp_path, refused, brought):
    assert "draft.path=nowhere: no model folder" in refused(*brought("twin", "draft.path=nowhere"), work=tmp_path / "work")


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ([Stage.speculate], True),
        ([Stage.speculate, Stage.report], True),
        ([Stage.corpus, Stage.generate, Stage.calibrate, Stage.report], True),
        ([Stage.corpus, Stage.generate, Stage.calibrate], False),
        ([Stage.distil, Stage.speculate], False),
        ([Stage.logits, Stage.speculate], False),
        ([Stage.speculate, Stage.export], False),
        (list(Stage), False),
    ],
)
def test_the_stages_say_whether_a_draft_is_measured_as_it_is(stages, expected):
    config = Config(stages=stages, draft=Draft(path="x"))
    assert existing.as_it_is(config) is expected
    assert not existing.as_it_is(replace(config, draft=Draft()))
    assert (Stage.logits in ancestors(stages, config)) is not (expected or Stage.logits not in ancestors(stages, Config()))


def test_nothing_is_cut_from_it():
    settled = existing.settled(Config(draft=Draft(path="x", layers=[0], vocabulary_size=5, coverage=0.5, fit_head=True)))
    assert (settled.draft.layers, settled.draft.vocabulary_size, settled.draft.coverage) == ([], 0, None)
    assert not settled.draft.fit_head
    assert not settled.generate.keep_states
