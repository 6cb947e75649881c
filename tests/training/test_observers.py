"""The time that a run still takes, by a clock that the test turns; TensorBoard's files in order."""

import time
from pathlib import Path

import pytest

from tests.training.conftest import read_curves
from vit.training.observers import ProgressBar, TensorBoard
from vit.training.plan import TrainingPlan

SIZES = ((0.6, (24, 24)), (1.0, (32, 32)))
EVALUATION_SECONDS = 6.0


@pytest.mark.parametrize("compile_seconds", [0.0, 10.0])
@pytest.mark.parametrize("step_seconds", [0.004, 0.1, 2.0])
def test_the_time_left_is_right_to_a_fifth_and_an_evaluation_after_a_minute(
    monkeypatch: pytest.MonkeyPatch, compile_seconds: float, step_seconds: float
) -> None:
    """Ten epochs, the last four at 1.8 times the pixels; every second one is evaluated."""
    clock = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: clock)
    steps = round(40 / step_seconds)
    plan = TrainingPlan(
        epochs=10,
        steps_per_epoch=steps,
        total_steps=10 * steps,
        seed=0,
        batch_size=32,
        evaluate_every_epochs=2,
        image_sizes=SIZES,
    )
    bar = ProgressBar(plan, image_size=(32, 32))
    bar.on_start(step=0, total_steps=plan.total_steps, settings={})
    estimates = []
    for step in range(plan.total_steps):
        epoch = step // steps
        side, _ = plan.image_size(epoch) or (0, 0)
        clock += step_seconds * side**2 / 32**2
        if step in (0, 6 * steps):
            clock += compile_seconds
        if (step + 1) % (2 * steps) == 0:
            clock += EVALUATION_SECONDS
        estimates.append((clock, bar.estimate_remaining_seconds(step + 1)))
    bar.on_end()
    late = [(then, seconds) for then, seconds in estimates if then > 60]
    assert len(late) > 50
    for then, seconds in late:
        assert seconds == pytest.approx(clock - then, rel=0.2, abs=EVALUATION_SECONDS), then
    assert estimates[-1][1] == 0.0


def test_a_run_that_goes_on_in_the_same_second_continues_its_curves(tmp_path: Path) -> None:
    """TensorBoard reads files in the order of their names, which end with a number: 10 would come
    before 9."""
    for first in range(12):
        board = TensorBoard(tmp_path)
        board.on_start(step=first, total_steps=12, settings={})
        board.writer.add_scalar("epoch/loss", float(first), first + 1)
        board.on_end()
    assert read_curves(tmp_path)["epoch/loss"] == [(step + 1, float(step)) for step in range(12)]
