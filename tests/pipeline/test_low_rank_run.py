"""The smoke experiment with a head of low rank: it trains, is lossless, and is exported as the stock model it stands for."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipeline import existing
from pipeline.choices import Stage
from pipeline.config import Config, Draft
from pipeline.errors import PipelineError
from pipeline.tiny import byte_tokenizer
from pipeline.undistilled import draft_identity
from tests.pipeline.conftest import SMOKE
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
