"""Registered drafts are versions with their files; the alias goes to a draft that was shown to beat its holder."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline import export, registry, tracking
from pipeline.check import check
from pipeline.choices import Stage, Verification
from pipeline.config import Config, Export, Target, Tracking
from pipeline.errors import PipelineError
from pipeline.registry import ALIAS, CONDITIONS, SPEEDS, beats
from tests.pipeline.exported import Child, finished, in_this_process, stage_folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An execution in a store of its own."""
    work = tmp_path_factory.mktemp("registry")
    with tracking.execution(Tracking(), work, "export", {}) as opened:
        yield opened


def context_of(root, speculative, name, **settings):
    """A finished run whose prompts took one second each plain and ``speculative`` seconds with the draft."""
    context = finished(root, register=name, **settings)
    rows = [{"id": f"p{n}", "plain_seconds": 1.0, "speculative_seconds": s} for n, s in enumerate(speculative)]
    context.parent(Stage.speculate).details["by_temperature"]["0"]["prompts"] = rows
    return context


def registered(run, root, speculative, name, passed=True):
    context = context_of(root, speculative, name)
    folder = root / "files"
    folder.mkdir()
    (folder / "model.safetensors").write_text(str(speculative))
    with run.child("export", {}) as child:
        return registry.register(context, child, folder, passed)


def holder(run, name):
    found = run.client.get_registered_model(name).aliases.get(ALIAS)
    return None if found is None else int(found)


def test_the_alias_stands_on_the_first_and_moves_to_a_faster_one_alone(run, tmp_path):
    first = registered(run, tmp_path / "a", [0.8, 0.8, 0.8], "moves")
    assert (first.version, first.leads, first.reason) == (1, True, "it is the first that passed the gate")
    slower = registered(run, tmp_path / "b", [0.9, 0.9, 0.9], "moves")
    assert (slower.version, slower.leads) == (2, False)
    assert slower.reason == "version 1: 0.89× its speed [0.89, 0.89] on the same 3 prompts, which is not shown to be faster"
    assert holder(run, "moves") == 1
    faster = registered(run, tmp_path / "c", [0.4, 0.4, 0.4], "moves")
    assert (faster.version, faster.leads) == (3, True)
    assert faster.reason == "version 1: 2.00× its speed [2.00, 2.00] on the same 3 prompts"
    assert holder(run, "moves") == 3


def test_a_version_holds_its_files(run, tmp_path):
    made = registered(run, tmp_path, [0.5], "files")
    version = run.client.get_model_version_by_alias("files", ALIAS)
    assert int(version.version) == made.version
    [found] = run.client.list_artifacts(version.run_id, "draft")
    copy = run.client.download_artifacts(version.run_id, found.path, str(tmp_path))
    assert Path(copy).read_text() == "[0.5]"
    assert version.source.endswith(f"{version.run_id}/artifacts/draft") or version.source == f"runs:/{version.run_id}/draft"


def test_a_draft_that_the_gate_would_have_refused_never_leads(run, tmp_path):
    alone = registered(run, tmp_path / "a", [0.1], "refused", passed=False)
    assert (alone.leads, alone.reason) == (False, "it did not pass the gate")
    assert holder(run, "refused") is None
    registered(run, tmp_path / "b", [0.5], "refused")
    assert not registered(run, tmp_path / "c", [0.1], "refused", passed=False).leads
    assert holder(run, "refused") == 2


def test_a_draft_measured_with_a_lossy_rule_never_leads(run, tmp_path):
    context = context_of(tmp_path, [0.1], "lossy")
    context.parent(Stage.speculate).details["by_temperature"]["0"]["lossy"] = {"total_variation": 0.2}
    context.config = replace(context.config, decoding=replace(context.config.decoding, verification=Verification.typical))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "model.safetensors").write_text("x")
    with run.child("export", {}) as child:
        made = registry.register(context, child, tmp_path / "files", passed=True)
    assert (made.leads, made.reason) == (False, "its speed was measured with a lossy rule")
    assert holder(run, "lossy") is None
    assert run.client.get_model_version("lossy", "1").tags["lossy"].startswith("typical acceptance")


@pytest.mark.parametrize("what", ["texts", "decoding", "verification", "format", "target"])
def test_drafts_measured_under_other_conditions_are_not_compared(tmp_path, what):
    context = context_of(tmp_path, [0.5], "x")
    before = registry.conditions(context)
    if what == "texts":
        context.artifacts[Stage.generate] = replace(context.parent(Stage.generate), fingerprint="f" * 16)
    elif what == "decoding":
        decoding = replace(context.config.decoding, top_p=0.9)
        context.config = replace(context.config, decoding=decoding)
    elif what == "verification":
        decoding = replace(context.config.decoding, verification=Verification.match)
        context.config = replace(context.config, decoding=decoding)
    elif what == "format":
        context.__dict__["dtype"] = "torch.bfloat16"
    else:
        context.__dict__["target"] = replace(context.target, fingerprint="1" * 16)
    assert registry.conditions(context) != before


def tags(conditions="same", **speeds):
    return {CONDITIONS: conditions, SPEEDS: json.dumps(speeds)}


@pytest.mark.parametrize(
    "old", [tags("other", a=1.0, b=1.0), tags(a=1.0, c=1.0), tags(a=1.0), {}], ids=["other", "prompts", "fewer", "foreign"]
)
def test_what_cannot_be_compared_does_not_lead(old):
    leads, reason = beats(tags(a=9.0, b=9.0), old, 0)
    assert not leads
    assert reason.startswith("not comparable")


@pytest.mark.parametrize(
    ("new", "leads"),
    [
        ({"a": 1.2, "b": 1.2, "c": 1.2}, True),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, False),  # equal
        ({"a": 2.0, "b": 1.2, "c": 0.5}, False),  # the median is above 1, the interval is not
    ],
)
def test_faster_means_that_the_interval_lies_above_one(new, leads):
    assert beats(tags(**new), tags(a=1.0, b=1.0, c=1.0), 0)[0] is leads


def test_a_draft_is_compared_prompt_by_prompt():
    """Each prompt gained a tenth; the prompts themselves differ by much more."""
    old = {"a": 1.0, "b": 2.0, "c": 3.0}
    assert beats(tags(**{key: 1.1 * value for key, value in old.items()}), tags(**old), 0) == (
        True,
        "1.10× its speed [1.10, 1.10] on the same 3 prompts",
    )


def test_the_stage_registers_what_it_exported(run, tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    context = context_of(tmp_path, [0.8] * 6, "stage")
    with run.child("export", {}) as child:
        metrics, details = export.run(context, stage_folder(context), child)
    assert (metrics["registry/version"], metrics["registry/leads"]) == (1, True)
    assert details["registered"]["name"] == "stage"
    version = run.client.get_model_version("stage", "1")
    names = {item.path.rpartition("/")[2] for item in run.client.list_artifacts(version.run_id, "draft")}
    assert {"model.safetensors", "tokenizer.json", "README.md", "gate.json"} <= names


def test_nothing_is_registered_unasked(tmp_path, monkeypatch):
    in_this_process(monkeypatch)
    context = finished(tmp_path)
    monkeypatch.setattr(registry, "register", lambda *_: pytest.fail("registered unasked"))
    metrics, details = export.run(context, stage_folder(context), Child())
    assert not [name for name in [*metrics, *details] if name.startswith("regist")]


def test_only_a_name_makes_it_another_export(tmp_path):
    context = finished(tmp_path)
    unasked = export.identity(context)["export"]
    assert "register" not in unasked  # exports that were made before are found again
    context.config = replace(context.config, export=replace(context.config.export, register="x"))
    assert export.identity(context)["export"] == unasked | {"register": "x"}


@pytest.mark.parametrize("name", ["", "a/b", "a:b", "it's", "-a", "two words"])
def test_a_name_that_the_registry_could_not_keep_is_refused(name):
    with pytest.raises(PipelineError, match=r"^export\.register=.*: give a name of letters"):
        check(Config(target=Target(path="x"), export=Export(register=name)))
