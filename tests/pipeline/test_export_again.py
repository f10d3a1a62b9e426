"""An export that is asked for again: kept if it is this very one, made again if another took its place."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.artifact import MANIFEST, fingerprint
from pipeline import export, registry
from pipeline.choices import Stage
from pipeline.errors import PipelineError
from tests.pipeline.exported import Child, finished, in_this_process, stage_folder


def export_of(context, folder, run_id="first"):
    """Run the stage as the flow does, its manifest last."""
    export.run(context, folder, Child(run_id))
    manifest = {"draft": context.parent(Stage.speculate).draft}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def settings(context, **changes):
    context.config = replace(context.config, export=replace(context.config.export, **changes))


def run_of(place):
    return json.loads((place / "provenance.json").read_text())["runs"]["export"]


@pytest.fixture
def two(tmp_path, monkeypatch):
    """One draft exported to ``out``, then another in its place; the first run's context and folder."""
    in_this_process(monkeypatch)
    context = finished(tmp_path, path=str(tmp_path / "out"))
    mine = stage_folder(context)
    theirs = mine.with_name(fingerprint("another export"))
    theirs.mkdir()
    export_of(context, mine)
    settings(context, overwrite=True)
    export_of(context, theirs, "second")
    settings(context, overwrite=False)
    return context, mine


def test_an_export_that_another_replaced_is_not_taken_for_this_one(tmp_path, two):
    context, folder = two
    with pytest.raises(PipelineError, match=r"this folder exists; .*export\.overwrite=true"):
        export.look_ahead(context, folder)
    assert (folder / MANIFEST).is_file()  # nothing is lost by a refusal
    settings(context, overwrite=True)
    export.look_ahead(context, folder)
    assert not (folder / MANIFEST).exists()
    export_of(context, folder, "third")
    assert run_of(tmp_path / "out") == "third"
    export.look_ahead(context, folder)
    assert (folder / MANIFEST).is_file()


def test_the_same_result_of_other_files_is_another_export(tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    context = finished(tmp_path, path=str(tmp_path / "out"))
    folder = stage_folder(context)
    export_of(context, folder)
    (folder / MANIFEST).write_text(json.dumps({"draft": "0" * 64}))
    with pytest.raises(PipelineError, match="this folder exists"):
        export.look_ahead(context, folder)


@pytest.mark.parametrize("end", [KeyboardInterrupt, PipelineError("the server is away")], ids=["interrupt", "error"])
def test_a_run_that_ended_after_publishing_goes_on_with_registration(tmp_path, monkeypatch, end):
    in_this_process(monkeypatch)
    context = finished(tmp_path, path=str(tmp_path / "out"), register="x")
    folder, registered = stage_folder(context), []

    def fails(*_):
        raise end

    monkeypatch.setattr(registry, "register", fails)
    with pytest.raises(type(end) if isinstance(end, Exception) else end):
        export.run(context, folder, Child("first"))
    made = registry.Registered("x", 1, True, "it is the first that passed the gate")
    monkeypatch.setattr(registry, "register", lambda _, run, place, passed: registered.append((run, place, passed)) or made)
    export.look_ahead(context, folder)
    _, details = export.run(context, folder, Child("second"))
    assert registered == [(Child("second"), tmp_path / "out", True)]
    assert details["registered"]["version"] == 1
    assert details["transformers"]["same_output"]  # it was proven again
    assert run_of(tmp_path / "out") == "first"


def interrupted(tmp_path, monkeypatch) -> tuple:
    """An export at ``out`` whose run never wrote its manifest."""
    in_this_process(monkeypatch)
    context = finished(tmp_path, path=str(tmp_path / "out"))
    export.run(context, stage_folder(context), Child("first"))
    return context, stage_folder(context)


def altered(path: Path) -> None:
    state = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(state | {name: torch.flip(state[name], [0])}, path, {"format": "pt"})


def test_what_an_interrupted_run_left_is_refused_if_it_was_altered(tmp_path, monkeypatch):
    context, folder = interrupted(tmp_path, monkeypatch)
    altered(tmp_path / "out" / "model.safetensors")
    with pytest.raises(PipelineError, match=r"differ from the trained draft's .*export\.overwrite=true writes them again"):
        export.run(context, folder, Child("second"))
    settings(context, overwrite=True)
    export.run(context, folder, Child("second"))
    assert run_of(tmp_path / "out") == "second"


def test_what_an_interrupted_run_of_another_draft_left_is_refused(tmp_path, monkeypatch):
    context, folder = interrupted(tmp_path, monkeypatch)
    provenance = tmp_path / "out" / "provenance.json"
    provenance.write_text(json.dumps(json.loads(provenance.read_text()) | {"draft_sha256": "0" * 64}))
    with pytest.raises(PipelineError, match="this folder exists"):
        export.run(context, folder, Child("second"))
