"""The plan of a run: fractions of a run are fractions of its steps, however long it is."""

from itertools import groupby

import pytest

from vit.config import load_config
from vit.training.plan import TrainingPlan

SIZES = ((0.3, (64, 64)), (0.65, (96, 96)), (1.0, (128, 128)))
RATES = "train.patch_drop_rates=[[0.3, 0], [0.9, 0.5], [1, 0]]"


def build_plan(total_steps: int, steps_per_epoch: int = 66) -> TrainingPlan:
    return TrainingPlan(
        load_config(None, [RATES]).train,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        batch_size=128,
        image_sizes=SIZES,
        mix_until=0.8,
    )


def test_a_run_of_whole_epochs_changes_between_epochs() -> None:
    plan = build_plan(40 * 66)
    sizes = [plan.find_phase(step).image_size for step in range(plan.total_steps)]
    assert [(size, len([*run])) for size, run in groupby(sizes)] == [
        ((64, 64), 12 * 66),
        ((96, 96), 14 * 66),
        ((128, 128), 14 * 66),
    ]
    assert [plan.find_phase(step).mixes for step in (32 * 66 - 1, 32 * 66)] == [True, False]


@pytest.mark.parametrize("total_steps", [20, 66, 100, 200, 264, 500, 2000])
def test_a_run_of_any_length_has_all_sizes_and_ends_at_the_full_one(total_steps: int) -> None:
    plan = build_plan(total_steps)
    steps = range(total_steps)
    phases = [plan.find_phase(step) for step in steps]
    sizes = [phase.image_size for phase in phases]
    assert [size for size, _ in groupby(sizes)] == [size for _, size in SIZES]
    rates = [phase.patch_drop_rate for phase in phases]
    assert [rate for rate, _ in groupby(rates)] == [0, 0.5, 0]
    assert [mixes for mixes, _ in groupby(phase.mixes for phase in phases)] == [True, False]
    # and each change is announced, so that batches of the new kind are made
    changes = {step for step in steps[1:] if sizes[step] != sizes[step - 1]}
    changes |= {step for step in steps[1:] if rates[step] != rates[step - 1]}
    announced = set()
    step = 0
    while step < total_steps:
        step = plan.find_phase(step).end
        announced.add(step)
    assert changes <= announced
