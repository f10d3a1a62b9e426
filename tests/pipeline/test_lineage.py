"""The store knows what every draft was made from: data to cache, cache to draft, draft to export."""

import json
from pathlib import Path

import pytest

from pipeline import lineage, tracking
from pipeline.choices import Source, Stage
from pipeline.config import Config, Corpus, Tracking
from pipeline.context import Artifact, Context
from pipeline.lineage import Model
from tests.pipeline.conftest import SMOKE, only
from tests.pipeline.test_tracking import execution_and_stages, runs_of


@pytest.fixture(scope="module")
def stored(smoke):
    """Client, execution, stages by name, models by kind."""
    client, runs = runs_of(smoke.work)
    execution, stages = execution_and_stages(runs)
    models = client.search_logged_models([execution.info.experiment_id])
    assert sorted(model.model_type for model in models) == ["draft", "export"], "one of each"
    whole = [client.get_run(run.info.run_id) for run in (execution, *stages)]  # a search leaves models out
    return client, whole[0], {run.info.run_name: run for run in whole[1:]}, {model.model_type: model for model in models}


def fingerprints(work) -> dict[str, str]:
    return {stage.name: only(work / "artifacts" / stage.name).name for stage in Config().stages}


def data_of(run) -> dict[str, str]:
    return {used.dataset.name.split()[0]: used.dataset.digest for used in run.inputs.dataset_inputs}


def made(run) -> list[str]:
    return [output.model_id for output in run.outputs.model_outputs] if run.outputs else []


def used(run) -> list[str]:
    return [model.model_id for model in run.inputs.model_inputs] if run.inputs else []


def test_from_an_export_one_comes_to_the_prompts(smoke, stored):
    _, _, stages, models = stored
    known = fingerprints(smoke.work)
    export, draft = models["export"], models["draft"]
    assert (export.tags["fingerprint"], export.tags["made_from"]) == (known["export"], known["distil"])
    assert export.params["draft"] == draft.name == f"draft-{known['distil']}"
    assert draft.tags["made_from"] == known["logits"] == data_of(stages["distil"])["logits"]
    assert data_of(stages["logits"]) == {"responses": known["generate"]}
    assert data_of(stages["generate"]) == {"prompts": known["corpus"]}
    assert data_of(stages["corpus"]) == {}


def test_models_are_ready_and_know_the_run_that_made_them(stored):
    _, _, stages, models = stored
    assert models["draft"].source_run_id == stages["distil"].info.run_id
    assert models["export"].source_run_id == stages["export"].info.run_id
    assert {str(model.status) for model in models.values()} == {"READY"}
    assert models["draft"].params["layers"] == "1"
    assert all(Path(model.tags["folder"], "config.json").is_file() for model in models.values())


def test_stages_that_read_the_draft_say_so(stored):
    _, _, stages, models = stored
    draft, export = models["draft"].model_id, models["export"].model_id
    assert {name for name, run in stages.items() if draft in used(run)} == {"speculate", "report", "export"}
    assert {name: made(run) for name, run in stages.items() if made(run)} == {"distil": [draft], "export": [export]}


def test_the_execution_shows_data_and_models(smoke, stored):
    _, execution, _, models = stored
    known = fingerprints(smoke.work)
    assert data_of(execution) == {"prompts": known["corpus"], "responses": known["generate"], "logits": known["logits"]}
    assert set(made(execution)) == {model.model_id for model in models.values()}
    places = {json.loads(one.dataset.source)["uri"] for one in execution.inputs.dataset_inputs}
    assert places == {str(only(smoke.work / "artifacts" / name)) for name in ("corpus", "generate", "logits")}


def test_a_draft_carries_what_was_measured_of_it(stored):
    _, execution, _, models = stored
    measured = {metric.key: metric.value for metric in models["draft"].metrics}
    for name in ("alignment/overlap", "acceptance/rate", "speed/ratio", "speed/ratio_predicted", "draft/validation_overlap"):
        assert measured[name] == execution.data.metrics[name]
    assert not any(name.startswith(("cost/", "corpus/")) for name in measured), "these are of the machine and the data"


def test_a_finished_command_given_again_adds_no_model(work, attempt):
    code, stderr = attempt(SMOKE, work=work)
    assert code == 0, stderr
    client, runs = runs_of(work)
    again = client.get_run(execution_and_stages(runs)[0].info.run_id)
    models = client.search_logged_models([again.info.experiment_id])
    assert len(models) == 2
    assert set(made(again)) == {model.model_id for model in models}


def test_a_draft_that_another_store_saw_made_is_known_here_too(tmp_path):
    """Results outlive stores: the first who reads the draft brings it in, without a maker; the next finds it."""
    draft = Model("draft-1", "draft", {"layers": "2"}, {"fingerprint": "1"})
    for name in ("one", "two"):
        with tracking.execution(Tracking(), tmp_path, name, {}) as run:
            run.reads([], [draft])
    [found] = run.client.search_logged_models([run.client.get_run(run.run_id).info.experiment_id])
    assert (found.name, found.params, found.source_run_id) == ("draft-1", {"layers": "2"}, None)


def test_what_nobody_reads_again_is_no_thing(tmp_path):
    context = Context(Config(corpus=Corpus(Source.dataset, path="mine.jsonl")), tmp_path, tmp_path)
    corpus, report = (Artifact(stage, tmp_path, "f", {"n": 1.0}, {}) for stage in (Stage.corpus, Stage.report))
    things = lineage.of(context, [report, corpus])
    assert [(data.name, data.digest, data.profile) for data in things.data] == [("prompts mine.jsonl", "f", {"n": 1.0})]
    assert (things.models, things.draft) == ([], None)
