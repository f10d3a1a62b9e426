"""What is exported is what was trained, in every family; what is not as it should be is refused and leaves nothing."""

import ast
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, PreTrainedTokenizerFast

from data.artifact import MANIFEST
from pipeline import draft as drafts
from pipeline import export, parity, stock_reader, tiny
from pipeline.choices import Format, GgufType, Stage
from pipeline.config import Draft as DraftConfig
from pipeline.errors import PipelineError
from tests.pipeline.exported import KEPT, Child, finished, in_this_process, model_of, responses, stage_folder

FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "gpt2")


def exported(context):
    return export.run(context, stage_folder(context), Child())


@pytest.mark.slow  # it starts a process that loads transformers; the smoke run does so in every run of the suite
def test_a_stranger_in_a_process_of_its_own_finds_what_was_trained(tmp_path, monkeypatch):
    watched, modules = tmp_path / "watched.py", tmp_path / "modules"
    watched.write_text(
        f"import runpy, sys\nrunpy.run_path({stock_reader.__file__!r}, run_name='__main__')\n"
        f"open({str(modules)!r}, 'w').write('\\n'.join(sys.modules))\n"
    )
    monkeypatch.setattr(stock_reader, "__file__", str(watched))
    context = finished(tmp_path, format=Format.both, gguf_type=GgufType.f32, path=str(tmp_path / "my dräft"))
    metrics, details = exported(context)
    place = tmp_path / "my dräft"
    assert {"README.md", "provenance.json", "gate.json", "serve.md", "draft.gguf", "model.safetensors",
            "tokenizer.json", "generation_config.json", "config.json"} <= {p.name for p in place.iterdir()}  # fmt: skip
    loaded = {name.partition(".")[0] for name in modules.read_text().splitlines()}
    assert "transformers" in loaded
    assert not {"pipeline", "speculative", "data", "hydra", "mlflow"} & loaded
    for form in ("transformers", "gguf"):
        assert details[form]["largest_logit_difference"] <= 1e-4
        assert details[form]["same_output"]
        assert metrics[f"export/{form}/overlap"] == pytest.approx(metrics[f"export/{form}/overlap_trained"], abs=0.01)


@pytest.mark.parametrize("trimmed", [True, False])
@pytest.mark.parametrize(("family", "tied"), [(f, t) for f in FAMILIES for t in (True, False)])
def test_every_family_comes_back_as_it_was(tmp_path, monkeypatch, family, tied, trimmed):
    in_this_process(monkeypatch)
    rows = 264 if family.startswith("qwen") else 259  # Qwen pads its matrices
    context = finished(tmp_path, family, tied, trimmed, rows)
    if tied:
        for name in ("OVERLAP", "ACCEPTANCE"):
            monkeypatch.setattr(parity, name, 1.0)  # hidden states of these share no direction that could exclude tokens
    exported(context)
    place = stage_folder(context) / "draft"
    loaded = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, trust_remote_code=False).eval()
    ours = drafts.load(context.parent(Stage.distil).folder / "draft", torch.float32)
    assert loaded.config.vocab_size == loaded.get_output_embeddings().weight.shape[0] == rows
    ids = torch.tensor([[*responses()[1].tokens]])
    with torch.no_grad():
        theirs, mine = loaded(input_ids=ids).logits, ours.model(input_ids=ids).logits
    torch.testing.assert_close(theirs[..., KEPT] if trimmed else theirs, mine, atol=1e-4, rtol=0)
    assert AutoTokenizer.from_pretrained(place).get_vocab() == context.target.tokenizer().get_vocab()
    assert not list(place.glob("*.py"))


def test_a_family_whose_drafts_cannot_be_built_is_refused_by_name():
    config = Gemma2Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                          num_key_value_heads=2, head_dim=8, final_logit_softcapping=1.0, query_pre_attn_scalar=8)  # fmt: skip
    with pytest.raises(PipelineError, match=r"target\.path: gemma2 .*cannot be built"):
        drafts.build(model_of(config), DraftConfig(layers=[0]), None)


def test_a_draft_of_fewer_rows_than_its_target_is_padded_row_for_row(tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    context = finished(tmp_path, "qwen2", rows=264)
    small = finished(tmp_path / "sibling", "qwen2", rows=259)
    folder = context.parent(Stage.distil).folder / "draft"
    shutil.rmtree(folder)
    shutil.copytree(small.parent(Stage.distil).folder / "draft", folder)
    context.artifacts[Stage.speculate] = small.parent(Stage.speculate)
    exported(context)
    loaded = AutoModelForCausalLM.from_pretrained(stage_folder(context) / "draft")
    assert loaded.get_input_embeddings().weight.shape[0] == loaded.get_output_embeddings().weight.shape[0] == 264
    assert loaded.get_input_embeddings().weight[259:].abs().max() == 0


def spoil(what):
    """Damage an export while it is being written, so that parity has something to find."""
    write = export._write

    def spoiled(*arguments):
        write(*arguments)
        path = arguments[-1] / "model.safetensors"
        state = load_file(path)
        name = {"weights": "model.layers.0.mlp.up_proj.weight", "lost": "model.norm.weight"}[what]
        if what == "lost":
            del state[name]
        else:
            state[name] = state[name].flip(0)
        save_file(state, path, {"format": "pt"})

    return spoiled


@pytest.mark.parametrize(("what", "said"), [("weights", "differ from the trained draft's by"), ("lost", "model.norm.weight")])
def test_files_that_are_not_the_trained_draft_are_never_published(tmp_path, monkeypatch, what, said):
    in_this_process(monkeypatch)
    context = finished(tmp_path, path=str(tmp_path / "out"))
    monkeypatch.setattr(export, "_write", spoil(what))
    with pytest.raises(PipelineError, match=said):
        exported(context)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


def test_a_draft_that_changes_the_output_is_refused(tmp_path, monkeypatch):
    def lying(order):
        answers = stock_reader.answer(order)
        answers["forms"]["transformers"]["assisted"][0][-1] += 1
        return answers

    monkeypatch.setattr(parity, "in_a_fresh_process", lying)
    with pytest.raises(PipelineError, match="change the target's greedy output"):
        exported(finished(tmp_path))


def test_an_expansion_that_costs_overlap_is_refused(tmp_path, monkeypatch):
    def costly(order):
        answers = stock_reader.answer(order)
        form = answers["forms"]["transformers"]
        form["logits"] = form["logits"].clone().index_add(1, KEPT - 1, torch.full((len(form["logits"]), len(KEPT)), 100.0))
        return answers

    monkeypatch.setattr(parity, "in_a_fresh_process", costly)
    with pytest.raises(PipelineError, match=r"have overlap 0\.\d+ where .*raise draft\.vocabulary_size"):
        exported(finished(tmp_path))


def test_a_reader_that_fails_is_quoted(tmp_path, monkeypatch):
    script = tmp_path / "reader.py"
    script.write_text("import sys\nsys.exit('weights of another kind')\n")
    monkeypatch.setattr(stock_reader, "__file__", str(script))
    order = parity.job(tmp_path, tmp_path, {"transformers": {}}, responses(), 1)
    with pytest.raises(PipelineError, match=r"plain transformers cannot use the exported files \(weights of another kind\)"):
        parity.in_a_fresh_process(order)


def test_the_reader_knows_transformers_alone():
    tree = ast.parse(Path(stock_reader.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} == {"json", "sys", "pathlib", "torch", "transformers"}


def test_no_answer_to_compare_on_is_said(tmp_path):
    with pytest.raises(PipelineError, match=r"^corpus\.test: no test prompt has an answer"):
        parity.job(tmp_path, tmp_path, {}, [], 1)


def test_a_draft_altered_after_it_was_measured_is_refused(tmp_path):
    context = finished(tmp_path, gate=False)  # no switch turns this off
    path = context.parent(Stage.distil).folder / "draft" / "draft.safetensors"
    state = load_file(path)
    state["model.norm.weight"][0] += 1e-6
    save_file(state, path)
    with pytest.raises(PipelineError, match="altered after they were measured"):
        exported(context)


def test_a_draft_of_another_vocabulary_is_refused(tmp_path):
    context, other = finished(tmp_path), finished(tmp_path / "other", rows=300, trimmed=False)
    context.artifacts[Stage.distil] = other.parent(Stage.distil)
    context.artifacts[Stage.speculate] = other.parent(Stage.speculate)
    with pytest.raises(PipelineError, match="ids up to 299 and the target has ids up to 258; it is of another tokenizer"):
        exported(context)


def test_a_draft_that_loses_is_refused_and_the_evidence_stays(tmp_path):
    context = finished(tmp_path, path=str(tmp_path / "out"))
    context.parent(Stage.speculate).details["by_temperature"]["0"]["ratio"]["low"] = 0.93
    with pytest.raises(PipelineError, match=r"lower end of the speed ratio at temperature 0 is 0\.93, 0\.07 below"):
        exported(context)
    evidence = json.loads((stage_folder(context) / "gate.json").read_text())
    assert (evidence["gate"], evidence["passed"]) == ("on", False)
    assert not (tmp_path / "out").exists()


def test_a_gate_that_is_off_lets_it_through_and_says_so(tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    context = finished(tmp_path, gate=False)
    context.parent(Stage.speculate).details["by_temperature"]["0"]["ratio"]["low"] = 0.93
    exported(context)
    evidence = json.loads((stage_folder(context) / "draft" / "gate.json").read_text())
    assert (evidence["gate"], evidence["passed"]) == ("off", False)


def test_disk_full_midway_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export.card, "model_card", full)
    context = finished(tmp_path, path=str(tmp_path / "out"))
    with pytest.raises(PipelineError, match=r"^export\.path=.*/out: .*No space left on device.*free some space"):
        exported(context)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


def test_disk_full_midway_keeps_the_export_it_would_have_replaced(tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    context = finished(tmp_path, path=str(tmp_path / "out"), overwrite=True)
    exported(context)
    before = (tmp_path / "out" / "provenance.json").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export.serve, "instructions", full)
    with pytest.raises(PipelineError, match="No space left"):
        exported(context)
    assert (tmp_path / "out" / "provenance.json").read_bytes() == before
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("stage", ["look ahead", "run"])
def test_a_destination_that_exists_is_refused_and_left_alone(tmp_path, stage):
    context = finished(tmp_path, path=str(tmp_path / "out"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(PipelineError, match=r"^export\.path=.*/out: this folder exists; .*export\.overwrite=true"):
        exported(context) if stage == "run" else export.look_ahead(context, stage_folder(context))
    assert (tmp_path / "out" / "mine").read_text() == "mine"


def test_overwrite_replaces_exports_and_nothing_else(tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    context = finished(tmp_path, path=str(tmp_path / "out"), overwrite=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(PipelineError, match="replaces earlier exports only"):
        export.look_ahead(context, stage_folder(context))
    (tmp_path / "out" / "provenance.json").write_text("{}")
    export.look_ahead(context, stage_folder(context))
    exported(context)
    assert not (tmp_path / "out" / "mine").exists()
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_destination_that_cannot_be_written_is_refused_ahead(tmp_path):
    (tmp_path / "file").write_text("mine")  # below a regular file, which stops root too
    context = finished(tmp_path, path=str(tmp_path / "file" / "out"))
    with pytest.raises(PipelineError, match=r"^export\.path=.*: the export cannot be written there .*choose another folder"):
        export.look_ahead(context, stage_folder(context))


def test_an_export_that_was_taken_away_is_made_again(tmp_path):
    context = finished(tmp_path, path=str(tmp_path / "out"))
    manifest = stage_folder(context) / MANIFEST
    manifest.write_text('{"draft": "of the draft"}')
    export.look_ahead(context, stage_folder(context))
    assert not manifest.exists()
    manifest.write_text('{"draft": "of the draft"}')
    (tmp_path / "out").mkdir()
    made_by = {"stages": {"export": stage_folder(context).name}, "draft_sha256": "of the draft"}
    (tmp_path / "out" / "provenance.json").write_text(json.dumps(made_by))
    export.look_ahead(context, stage_folder(context))  # made by this very result, so it is no stranger
    assert manifest.exists()


def test_a_target_without_template_and_special_tokens_is_exported(tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    bare = PreTrainedTokenizerFast(tokenizer_object=tiny.byte_tokenizer().backend_tokenizer)
    context = finished(tmp_path, tokenizer=bare)
    (context.target.folder / "generation_config.json").unlink()
    exported(context)
    place = stage_folder(context) / "draft"
    assert AutoTokenizer.from_pretrained(place).chat_template is None
    assert json.loads((place / "generation_config.json").read_text())["eos_token_id"] == 1


@pytest.mark.parametrize(("stated", "written"), [(0, 0), ([0, 1], [0, 1]), (None, None)])
def test_an_end_of_id_zero_is_an_end(tmp_path, monkeypatch, stated, written):
    context = finished(tmp_path)
    known = SimpleNamespace(eos_token_id=stated if isinstance(stated, int) else None, bos_token_id=None, pad_token_id=None)
    monkeypatch.setattr(type(context.target), "tokenizer", lambda _: known)
    (context.target.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stated}))
    assert export._endings(context).eos_token_id == written


def test_every_end_of_the_target_travels_and_nothing_of_its_sampling(tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    context = finished(tmp_path)
    path = context.target.folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [5, 1], "temperature": 0.6, "do_sample": True, "bos_token_id": 0}))
    exported(context)
    written = json.loads((stage_folder(context) / "draft" / "generation_config.json").read_text())
    assert written["eos_token_id"] == [1, 5]
    assert "temperature" not in written


@pytest.mark.parametrize("family", ["gemma", "gpt2"])
def test_a_family_without_gguf_is_refused_before_anything_is_written(tmp_path, family):
    context = finished(tmp_path, family, format=Format.both, path=str(tmp_path / "deep" / "out"))
    with pytest.raises(PipelineError, match=rf"^export\.format=gguf: {family} models are not written"):
        export.look_ahead(context, stage_folder(context))
    assert not (tmp_path / "deep" / "out").exists()


def test_a_tokenizer_that_is_no_byte_level_bpe_is_refused_ahead(tmp_path):
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    context = finished(tmp_path, tokenizer=PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="a"), format=Format.gguf)
    with pytest.raises(PipelineError, match=r"tokenizer \(WordLevel\) is no byte-level BPE"):
        export.look_ahead(context, stage_folder(context))
