"""Where an export lies and what it is called: odd names, paths that are shown, a disk that fails; and a draft that is noise."""

import copy
import json
import resource
from contextlib import contextmanager

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline import draft as drafts
from pipeline import export, gate, held_out
from pipeline.choices import Format, Stage
from pipeline.config import Draft as DraftConfig
from pipeline.config import Export
from pipeline.errors import PipelineError
from speculative import Draft, Sampling
from tests.pipeline.exported import MEASURED, Child, config_of, finished, in_this_process, model_of, responses, stage_folder

ODD = "Modell für «x» ü 模型"


def exported(context):
    return export.run(context, stage_folder(context), Child())


@pytest.mark.parametrize("form", list(Format), ids=lambda form: form.name)
def test_names_with_spaces_and_letters_beyond_ascii_come_through(tmp_path, monkeypatch, form):
    in_this_process(monkeypatch)
    place = tmp_path / "mein Entwurf" / "für 模型"
    context = finished(tmp_path / "ein Ordner ü", name=ODD, format=form, path=str(place))
    export.look_ahead(context, stage_folder(context))
    exported(context)
    assert f"`{ODD}`" in (place / "README.md").read_text(encoding="utf-8")
    if form is not Format.gguf:
        assert AutoModelForCausalLM.from_pretrained(place).config.vocab_size == 259
        assert AutoTokenizer.from_pretrained(place).get_vocab() == context.target.tokenizer().get_vocab()
    if form is not Format.transformers:
        fields = gguf.GGUFReader(place / "draft.gguf").fields
        assert fields["general.name"].contents() == f"Draft for {ODD}"


@pytest.mark.parametrize("path", [None, "my drafts/one"])
def test_the_place_is_shown_as_seen_from_here(tmp_path, monkeypatch, path):
    in_this_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    context = finished(tmp_path, path=path)
    _, details = exported(context)
    assert details["folder"] == (path or str((stage_folder(context) / "draft").relative_to(tmp_path)))
    assert (tmp_path / details["folder"] / "model.safetensors").is_file()


def test_the_evidence_is_shown_as_seen_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    context = finished(tmp_path)
    context.parent(Stage.speculate).details["lossless"]["different"] = 1
    with pytest.raises(PipelineError) as refused:
        exported(context)
    place = (stage_folder(context) / "gate.json").relative_to(tmp_path)
    assert f"the evidence is in {place};" in str(refused.value)
    assert str(tmp_path) not in str(refused.value)
    assert json.loads(place.read_text())["passed"] is False


@contextmanager
def files_up_to(size):
    """The system itself refuses to let a file grow beyond ``size`` bytes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("form", [Format.transformers, Format.gguf], ids=lambda form: form.name)
def test_a_write_that_the_system_refuses_midway_leaves_nothing(tmp_path, monkeypatch, form):
    in_this_process(monkeypatch)
    context = finished(tmp_path, format=form, path=str(tmp_path / "out"))
    with (
        files_up_to(40_000),
        pytest.raises(PipelineError, match=r"^export\.path=.*/out: .*cannot be written .*free some space"),
    ):
        exported(context)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))
    exported(context)
    assert (tmp_path / "out" / "README.md").is_file()


@pytest.mark.parametrize("name", ["config.json", "shape.json"])
def test_any_file_of_the_draft_that_was_altered_is_enough(tmp_path, name):
    context = finished(tmp_path)
    path = context.parent(Stage.distil).folder / "draft" / name
    path.write_text(path.read_text() + "\n")
    with pytest.raises(PipelineError, match="altered after they were measured"):
        exported(context)


def sure_of_itself(seed):
    """A random model with one likely token at each position: two of them agree on next to nothing."""
    model = model_of(config_of("llama", tied=False))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.2 * torch.randn_like(parameter))
        model.get_output_embeddings().weight *= 10
    return model


def figures_of(target, draft):
    """What stage speculate would tell the gate of a draft whose overlap is measured here and whose speed is good."""
    [found] = held_out.measure(target, [draft], responses(), Sampling(1.0), "agreement")
    figures = copy.deepcopy(MEASURED)
    figures["by_temperature"]["0"]["after"]["overlap"] = found.means["overlap"]
    return figures


def test_the_gate_refuses_a_random_draft_and_lets_one_that_agrees_pass():
    target = sure_of_itself(1)
    twin, random = drafts.build(target, DraftConfig(layers=[]), None), Draft(sure_of_itself(2), None)
    agrees, differs = (gate.checks(Export(), figures_of(target, draft), 1.0) for draft in (twin, random))
    assert [found.key for found in agrees if not found.passed] == []
    assert [found.key for found in differs if not found.passed] == ["export.minimum_overlap"]
    with pytest.raises(PipelineError, match=r"overlap at temperature 0 is 0\.0\d+, .* below export\.minimum_overlap=0\.1"):
        gate.refuse(differs, "gate.json")
