"""A sweeper that searches gets the measured speed ratio of each job, and keeps the highest."""

import pytest
import yaml

from tests.pipeline.conftest import SMOKE
from tests.pipeline.test_sweep import family

OPTUNA = (
    "hydra/sweeper=optuna",
    "hydra/sweeper/sampler=grid",
    "hydra.sweeper.direction=maximize",
    "hydra.sweeper.n_trials=2",
    "hydra.sweeper.n_jobs=1",
)


@pytest.fixture(autouse=True)
def installed():
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="the extra `optuna` is not installed")


@pytest.mark.slow  # two whole jobs
def test_the_search_is_for_the_highest_measured_ratio(work, attempt):
    code, stderr = attempt("-m", SMOKE, *OPTUNA, "trainer.max_steps=2,4", "decoding.baselines=false", work=work)
    assert code == 0, stderr
    [sweep] = [run for run in family(work)[0] if "draftsmith.sweep" in run.data.tags]
    below = family(work)[1][sweep.info.run_id]
    ratios = {run.data.params["trainer.max_steps"]: run.data.metrics["speed/ratio"] for run in below}
    assert ratios.keys() == {"2", "4"}
    [kept] = (work / "sweeps").glob("*/optimization_results.yaml")
    found = yaml.safe_load(kept.read_text())
    assert found["best_value"] == max(ratios.values())
    assert ratios[str(found["best_params"]["trainer.max_steps"])] == max(ratios.values())


@pytest.mark.slow  # with optuna's imports
def test_a_trial_that_fails_ends_the_search_and_is_named(work, attempt):
    code, stderr = attempt("-m", SMOKE, *OPTUNA, "trainer.max_steps=0,4", "stages=[distil]", work=work)
    assert code == 2
    assert "trainer.max_steps=0: give a number above 0" in stderr
