"""The smoke experiment with Medusa heads: all stages, the same bytes after a failure, an export that names its target."""

import json

import pytest
import torch
from safetensors.torch import load_file

from pipeline.head_module import HeadDistillation
from speculative import medusa
from tests.pipeline.conftest import SMOKE, STAGES, copy_work, digest

MEDUSA = (SMOKE, "draft=medusa", "codec=hidden", "decoding.prompts=1", "decoding.baselines=false")


@pytest.fixture(scope="module")
def done(smoke, tmp_path_factory):
    """The smoke run's responses, and what Medusa heads make of them."""
    return copy_work(smoke.work, tmp_path_factory.mktemp("medusa") / "work")


def newest(work, stage):
    found = (work / "artifacts" / stage).glob("*/manifest.json")
    return max(found, key=lambda path: path.stat().st_mtime).parent


def test_every_stage_runs_resumes_and_exports(done, attempt, monkeypatch):
    real, steps = HeadDistillation.training_step, []

    def killed(self, batch, index):
        steps.append(self.global_step)
        if len(steps) == 7:
            raise RuntimeError("the machine goes down")
        return real(self, batch, index)

    monkeypatch.setattr(HeadDistillation, "training_step", killed)
    with pytest.raises(RuntimeError, match="the machine goes down"):
        attempt(*MEDUSA, "stages=[logits,distil]", work=done)
    whole = copy_work(done, done.parent / "whole")
    for folder in (whole / "artifacts" / "distil").iterdir():  # one run from the start, one from its last checkpoint
        if folder.is_dir() and not (folder / "manifest.json").is_file():
            for path in (folder / "checkpoints").iterdir():
                path.unlink()
    for work in (done, whole):
        code, stderr = attempt(*MEDUSA, "stages=[distil]", work=work)
        assert code == 0, stderr
    assert steps[7] == 4  # the last checkpoint before the step that failed
    ours, theirs = (digest(newest(work, "distil") / "draft") for work in (done, whole))
    assert ours == theirs
    assert set(ours) == {medusa.WEIGHTS, medusa.CONFIG}

    code, stderr = attempt(*MEDUSA, work=done)
    assert code == 0, stderr
    details = {stage: json.loads((newest(done, stage) / "manifest.json").read_text()) for stage in STAGES}
    speculate = details["speculate"]["details"]
    assert speculate["lossless"]["different"] == 0
    assert len(speculate["by_temperature"]["0"]["by_head"]) == 4
    costs = details["calibrate"]["details"]["by_temperature"]["0"]["costs"]
    assert costs["draft"] == 0.0
    assert costs["heads"] > 0.0
    folder = newest(done, "export") / "draft"
    assert {medusa.WEIGHTS, medusa.CONFIG, "README.md", "serve.md", "gate.json", "provenance.json"} == {
        path.name for path in folder.iterdir()
    }
    named = json.loads((folder / medusa.CONFIG).read_text())["target"]
    assert named == json.loads((folder / "provenance.json").read_text())["target"]["fingerprint"]
    trained = load_file(newest(done, "distil") / "draft" / medusa.WEIGHTS)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in load_file(folder / medusa.WEIGHTS).items())
    assert "Medusa heads" in (newest(done, "report") / "report.md").read_text()
