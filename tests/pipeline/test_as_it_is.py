"""A pair that someone brings is measured as it is, from one command and an empty folder; nothing of it is trained."""

import json
import shutil
from dataclasses import replace

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import speculative
from data.responses import read_shards
from pipeline import draft as drafts
from pipeline import existing, held_out, speculate, tiny
from pipeline.choices import Stage
from pipeline.config import Config, Draft
from pipeline.errors import PipelineError
from pipeline.route import ancestors
from pipeline.undistilled import draft_identity
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


@pytest.fixture
def renumbered(pair, tmp_path):
    """The target's twin under another numbering: two tokens have changed places, and with them their rows."""
    place = tmp_path / "renumbered"
    shutil.copytree(pair / "twin", place)
    inner = json.loads((place / "tokenizer.json").read_text())
    ids = inner["model"]["vocab"]
    one, other = ids["e"], ids["a"]
    ids["e"], ids["a"] = other, one
    (place / "tokenizer.json").write_text(json.dumps(inner))
    state = load_file(place / "model.safetensors")
    rows = state["model.embed_tokens.weight"]
    rows[[one, other]] = rows[[other, one]].clone()
    save_file(state, place / "model.safetensors", {"format": "pt"})
    return place


def test_a_draft_of_another_tokenizer_is_measured_over_the_tokens_of_both(tmp_path, attempt, brought, renumbered):
    work = tmp_path / "work"
    code, stderr = attempt(*brought("twin", f"draft.path={renumbered}", "decoding.draft_tokens=2"), work=work)
    assert code == 0, stderr
    found = details(work, "speculate")
    for entry in found["by_temperature"].values():  # untranslated, "e" and "a" would be taken for each other
        assert entry["after"]["overlap"] == pytest.approx(1, abs=1e-5)
    assert found["by_temperature"]["0"]["acceptance_rate"] == 1
    assert found["lossless"]["different"] == 0
    assert details(work, "distil")["vocabulary_coverage"] == 1


def test_a_draft_of_another_tokenizer_is_not_trained(tmp_path, refused, brought, renumbered):
    stages = "stages=[corpus,generate,logits,distil]"
    message = refused(*brought("twin", f"draft.path={renumbered}", stages), work=tmp_path / "work")
    assert f"draft.path={renumbered}: its tokenizer is not the target's (id " in message


def test_a_draft_that_shares_too_few_tokens_is_refused(pair, tmp_path):
    """Every token of the draft but the special ones is doubled, so it is none of the target's."""
    place = tmp_path / "other"
    shutil.copytree(pair / "twin", place)
    inner = json.loads((place / "tokenizer.json").read_text())
    inner["model"]["vocab"] = {token * (1 + (i > 2)): i for token, i in inner["model"]["vocab"].items()}
    (place / "tokenizer.json").write_text(json.dumps(inner))
    target = AutoTokenizer.from_pretrained(pair / "target")
    with pytest.raises(PipelineError, match=r"^draft\.path=.*shares 3 of the target's 259 tokens, too few .*\(id 3 is "):
        existing.of_other_tokenizer(str(place), target, 259)


def test_a_draft_that_is_padded_otherwise_is_of_the_same_tokenizer(pair):
    target = AutoTokenizer.from_pretrained(pair / "target")
    assert existing.of_other_tokenizer(str(pair / "twin"), target, 264) is None


def test_translation_is_kept_with_the_weights(pair, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(pair / "twin", dtype=torch.float32)
    draft = speculative.Draft(model, torch.tensor([1, 5]), torch.tensor([9, 4]), torch.arange(259).flip(0))
    drafts.save(draft, tmp_path)
    again = drafts.load(tmp_path, torch.float32)
    assert all(torch.equal(getattr(again, name), getattr(draft, name)) for name in ("vocabulary", "outputs", "inputs"))
    ids = torch.tensor([[7, 8, 9]])
    with torch.no_grad():
        whole = model(input_ids=258 - ids).logits[0]
        torch.testing.assert_close(held_out.guesses(again, ids, 3), whole[:2, [9, 4]])


def test_a_draft_is_fetched_by_its_name(pair, monkeypatch):
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: asked.append(name) or str(pair / "twin"))
    target = AutoTokenizer.from_pretrained(pair / "target")
    model = existing.load("somebody/a-draft", target)
    assert model.config.num_hidden_layers == 3
    config = Draft(path="somebody/a-draft")
    assert draft_identity(config)["files"] == existing.fingerprint_of(pair / "twin") is not None
    assert asked == ["somebody/a-draft"]


def test_a_name_that_cannot_be_fetched_is_refused(monkeypatch):
    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(PipelineError, match=r"^draft\.path=nobody/a-draft: neither a folder nor a hub model .*no network"):
        existing.located("nobody/a-draft")


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
