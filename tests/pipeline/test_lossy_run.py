"""The smoke run with typical acceptance: no figure that was decoded with loss has a name or a place without "lossy"."""

import json
import math

import pytest

from tests.pipeline.conftest import SMOKE
from tests.pipeline.test_medusa_run import newest
from tests.pipeline.test_tracking import execution_and_stages, runs_of

DECODED = ("speed/", "acceptance/", "tree/")
OPTIONS = (SMOKE, "decoding.verification=typical", "decoding.tree=[2,1]", "decoding.baselines=false", "decoding.prompts=2")


def test_a_run_says_what_is_lossy_and_by_how_much(work, attempt, refused):
    assert "export.lossless=true lets no lossy measurement pass" in refused(*OPTIONS, work=work)
    code, stderr = attempt(*OPTIONS, "stages=[calibrate,speculate,report]", work=work)
    assert code == 0, stderr
    manifest = json.loads((newest(work, "speculate") / "manifest.json").read_text())
    metrics, entries = manifest["metrics"], manifest["details"]["by_temperature"]
    hot = [name for name in metrics if name.startswith(DECODED) and "_at_1" in name]
    assert hot
    assert all(name.endswith("_at_1_lossy") for name in hot)
    assert {"speed/ratio", "tree/ratio", "speed/ratio_at_1_lossy", "speed/ratio_predicted_at_1_lossy"} <= set(metrics)
    found = entries["1"]["lossy"]
    assert 0 < metrics["lossy/total_variation_at_1"] == found["total_variation"] < 1
    assert metrics["lossy/kl_at_1"] >= 2 * metrics["lossy/total_variation_at_1"] ** 2 - 1e-6
    assert set(found["at_least"]) == {"plain", "speculative", "tree"}
    assert all(math.isfinite(bound["mean"]) for bound in found["at_least"].values())
    assert "lossy" not in entries["0"]
    assert manifest["details"]["lossless"]["different"] == 0

    report = newest(work, "report")
    factors = json.loads((report / "manifest.json").read_text())["metrics"]
    assert {"waterfall/operations", "waterfall/operations_at_1_lossy"} <= set(factors)
    assert "waterfall/operations_at_1" not in factors
    text = (report / "report.md").read_text()
    for row in ("speed T=1 (lossy)", "tree T=1 (lossy)", "acceptance T=1 (lossy)", "lossy T=1", "speed T=0"):
        assert f"| {row} |" in text
    assert "(lossy)" in (report / "report.html").read_text()
    assert json.loads((report / "record.json").read_text())["by_temperature"]["1"]["lossy"] == found

    execution, stages = execution_and_stages(runs_of(work)[1])
    tags = {run.info.run_name: run.data.tags for run in stages}
    label = "typical acceptance (ε = 0.09, δ = 0.3) at temperature 1"
    assert execution.data.tags["lossy"] == tags["speculate"]["lossy"] == tags["report"]["lossy"] == label
    assert "lossy" not in tags["calibrate"]
    assert execution.data.params["decoding.verification"] == "typical"
    assert not any(name in execution.data.metrics for name in ("speed/ratio_at_1", "tree/ratio_at_1"))


@pytest.mark.slow  # it decodes every way of drafting
def test_the_comparison_of_drafters_measures_how_far_each_way_is(work, attempt):
    options = (*OPTIONS, "stages=[drafters]", "decoding.temperatures=[1.0]", "drafters.prompts=1")
    code, stderr = attempt(*options, work=work)
    assert code == 0, stderr
    manifest = json.loads((newest(work, "drafters") / "manifest.json").read_text())
    bounds = manifest["details"]["by_temperature"]["1"]["lossy"]["at_least"]
    assert {"none", "draft model, chain", "draft model, tree", "lookup else model"} <= set(bounds)
    assert all(name.endswith("_lossy") for name in manifest["metrics"])
    assert "## Drafters at temperature 1 (lossy)" in (newest(work, "drafters") / "drafters.md").read_text()
