"""Learning rates by hand: warm-up, cosine, plateau and decay."""

import pytest

from pipeline.choices import Schedule
from pipeline.config import Optimizer
from pipeline.schedule import share_of_rate


def shares(steps: int, upto: int, **options) -> list[float]:
    return [share_of_rate(step, steps, Optimizer(**options)) for step in range(upto)]


def test_cosine_by_hand():
    found = shares(6, 9, schedule=Schedule.cosine, warmup_share=2 / 6, final_share=0.2)
    # Two of warm-up; then cos 0, 45°, 90°, 135° and 180° of a fall by 0.8 over four steps.
    fall = [1.0, 0.2 + 0.8 * 0.8535533906, 0.6, 0.2 + 0.8 * 0.1464466094, 0.2]
    assert found == pytest.approx([0.5, 1.0, *fall, 0.2, 0.2])


def test_warm_up_plateau_and_decay_by_hand():
    found = shares(10, 13, schedule=Schedule.wsd, warmup_share=0.2, decay_share=0.4, final_share=0.2)
    # Two of warm-up, four at 1 before the fall by 0.8 over four steps begins at step 6.
    assert found == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_wsd_to_zero_ends_one_step_above_it():
    found = shares(4, 5, schedule=Schedule.wsd, warmup_share=0.0, decay_share=1.0, final_share=0.0)
    # No warm-up still counts its first step, at the whole rate.
    assert found == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_wsd_without_decay_stays():
    assert shares(5, 5, schedule=Schedule.wsd, warmup_share=0.0, decay_share=0.0, final_share=0.0) == [1.0] * 5


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("warmup", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 7, 200])
def test_every_share_of_warm_up_gives_rates_above_zero(schedule, warmup, steps):
    found = shares(steps, steps, schedule=schedule, warmup_share=warmup, decay_share=1 - warmup)
    assert all(0 < share <= 1 for share in found)
    assert max(found) == 1.0
