"""``+experiment=link``: many drafts from one cache, told apart by what distil reads alone."""

import itertools
import json

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from pipeline import flow
from pipeline.check import check
from pipeline.choices import Stage
from pipeline.context import Context
from tests.pipeline.conftest import SMOKE
from tests.pipeline.test_config import CONF, composed

STAGES = [Stage.speculate]


def grid() -> list[list[str]]:
    """The overrides of each job."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        hydra = compose("config", ["+experiment=link"], return_hydra_config=True).hydra
    assert hydra.mode.name == "MULTIRUN"
    swept = OmegaConf.to_container(hydra.sweeper.params)
    choices = [
        [f"{key}={value}" for value in (json.loads(f"[{text}]") if text[0] == "[" else text.split(","))]
        for key, text in swept.items()
    ]
    return [list(job) for job in itertools.product(*choices)]


def folders(tmp_path, *overrides: str) -> dict[Stage, str]:
    """Where the results of these overrides would lie, on tiny models."""
    context = Context(composed(SMOKE, *overrides), tmp_path, tmp_path)
    return {stage: folder.name for stage, folder in flow._foreseen(context, STAGES).items()}


def test_it_makes_twenty_four_drafts_of_several_shapes_objectives_budgets_and_seeds():
    jobs = grid()
    assert len({tuple(job) for job in jobs}) >= 24
    keys = [{part for job in jobs for part in job if part.startswith(f"{key}=")} for key in SWEPT]
    assert all(len(found) >= 2 for found in keys)
    for job in jobs:
        check(composed("+experiment=link", *job))


SWEPT = ("draft.layers", "objective", "trainer.max_steps", "trainer.seed")


def test_all_its_drafts_share_one_cache_and_no_two_are_one_draft(tmp_path):
    few = [job for job in grid() if "draft.layers=[0, 1, 2, 3]" not in job]  # the tiny target has two layers
    assert len(few) >= 16
    found = [folders(tmp_path, *job) for job in few]
    for stage in (Stage.corpus, Stage.generate, Stage.logits):
        assert len({job[stage] for job in found}) == 1
    assert len({job[Stage.calibrate] for job in found}) == 2, "one for each shape"
    for stage in (Stage.distil, Stage.speculate):
        assert len({job[stage] for job in found}) == len(few)


def test_it_takes_the_text_and_cache_of_the_default_run():
    link, default = composed("+experiment=link"), composed()
    for group in ("seed", "corpus", "target", "generate", "codec"):
        assert getattr(link, group) == getattr(default, group)


def test_its_drafts_are_compared_at_one_k_over_prompts_that_make_a_median():
    decoding = composed("+experiment=link").decoding
    assert decoding.draft_tokens is not None
    assert decoding.prompts >= 6
    assert {0.0, 1.0} <= set(decoding.temperatures)


def test_how_a_draft_is_trained_shapes_no_cost(tmp_path):
    plain, *others = (folders(tmp_path, *text) for text in ([], ["draft.fit_head=false"], ["draft.train_embedding=true"]))
    for other in others:
        assert other[Stage.calibrate] == plain[Stage.calibrate]
        assert other[Stage.distil] != plain[Stage.distil]
    assert folders(tmp_path, "draft.vocabulary_size=64")[Stage.calibrate] != plain[Stage.calibrate]


def test_the_trainers_own_seed_changes_what_distil_makes_alone(tmp_path):
    plain, same, other = (folders(tmp_path, *text) for text in ([], ["trainer.seed=0"], ["trainer.seed=1"]))
    assert plain == same, "null is the seed of the run"
    changed = {stage for stage in plain if plain[stage] != other[stage]}
    assert changed == {Stage.distil, Stage.speculate}


@pytest.mark.slow
def test_the_trainers_own_seed_gives_another_draft(work, attempt):
    code, stderr = attempt(SMOKE, "stages=[distil]", "trainer.seed=5", work=work)
    assert code == 0, stderr
    losses = {
        path.parent.name: json.loads(path.read_text())["details"]["validation"]
        for path in (work / "artifacts" / "distil").glob("*/manifest.json")
    }
    assert len(losses) == 2
    first, second = losses.values()
    assert first != second
    assert len(list((work / "artifacts" / "logits").glob("*/manifest.json"))) == 1
