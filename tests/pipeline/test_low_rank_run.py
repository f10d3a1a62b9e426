"""The smoke experiment with a head of low rank: it trains, is lossless, and is exported as the stock model it stands for."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from data.artifact import folder_hash
from pipeline import draft as drafts
from pipeline import existing, export, low_rank
from pipeline.choices import Format, Stage
from pipeline.config import Config, Draft
from pipeline.errors import PipelineError
from pipeline.tiny import byte_tokenizer
from pipeline.undistilled import draft_identity
from tests.pipeline.conftest import SMOKE
from tests.pipeline.exported import Child, finished, in_this_process, stage_folder
from tests.pipeline.test_link_experiment import folders
from tests.pipeline.test_medusa_run import newest

RANK = (SMOKE, "draft.head_rank=12", "decoding.prompts=1", "decoding.baselines=false", "export.format=both")


@pytest.mark.slow
def test_every_stage_runs_and_the_export_is_what_was_trained(work, attempt):
    code, stderr = attempt(*RANK, work=work)
    assert code == 0, stderr
    folder = newest(work, "distil") / "draft"
    trained = load_file(folder / "draft.safetensors")
    up, down = trained["lm_head.up.weight"], trained["lm_head.down.weight"]
    assert (up.shape, down.shape) == ((128, 12), (12, 64))
    assert json.loads((folder / "shape.json").read_text())["head_rank"] == 12
    manifests = {stage: json.loads((newest(work, stage) / "manifest.json").read_text()) for stage in ("speculate", "export")}
    lossless = manifests["speculate"]["details"]["lossless"]
    assert lossless["different"] == 0
    assert lossless["prompts"] > 0
    for form in ("transformers", "gguf"):
        likeness = manifests["export"]["details"][form]
        assert likeness["same_output"]
        assert likeness["largest_logit_difference"] <= 1e-4
    place = newest(work, "export") / "draft"
    stock = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    torch.testing.assert_close(stock.lm_head.weight[trained["draft_vocabulary"]], up @ down, atol=1e-6, rtol=1e-5)
    card = (place / "README.md").read_text()
    assert "vocabulary 128, head of rank 12" in card
    assert "the two matrices of its head are multiplied out to one" in card


@pytest.mark.parametrize("trimmed", [True, False])
def test_both_forms_of_the_export_are_the_product_and_nothing_is_rounded_but_it(tmp_path, monkeypatch, trimmed):
    in_this_process(monkeypatch)
    context = finished(tmp_path, trimmed=trimmed, format=Format.both)
    folder = context.parent(Stage.distil).folder / "draft"
    draft = drafts.load(folder, torch.float32)
    low_rank.factor(draft.model, 20)
    drafts.save(draft, folder)
    context.artifacts[Stage.speculate] = replace(context.parent(Stage.speculate), draft=folder_hash(folder))
    _, details = export.run(context, stage_folder(context), Child())
    for form in ("transformers", "gguf"):
        assert details[form]["largest_logit_difference"] <= 1e-4
        assert details[form]["same_output"]


def test_a_rank_shapes_draft_and_cost_and_no_rank_leaves_results_as_they_were(tmp_path):
    plain, same, other = (folders(tmp_path, *text) for text in ([], ["draft.head_rank=null"], ["draft.head_rank=12"]))
    assert same == plain
    changed = {stage for stage in plain if plain[stage] != other[stage]}
    assert changed == {Stage.distil, Stage.calibrate, Stage.speculate}
    assert "head_rank" not in draft_identity(Draft())
    assert draft_identity(Draft(head_rank=12))["head_rank"] == 12


def test_a_draft_that_is_measured_as_it_is_keeps_its_head(tmp_path):
    config = Config(stages=[Stage.speculate], draft=Draft(path=str(tmp_path), head_rank=8))
    with pytest.raises(
        PipelineError, match=r"^draft\.head_rank=8: the draft at draft\.path=.* is measured as it is.*leave it out"
    ):
        existing.look_ahead(existing.settled(config), byte_tokenizer())
