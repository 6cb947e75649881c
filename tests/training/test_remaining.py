"""The time that a run still takes, by a clock that the test turns."""

import time

import pytest

from vit.training.plan import TrainingPlan
from vit.training.remaining import RemainingTime

SIZES = ((0.6, (24, 24)), (1.0, (32, 32)))


@pytest.mark.parametrize("compile_seconds", [0.0, 10.0])
@pytest.mark.parametrize("step_seconds", [0.004, 0.1, 2.0])
def test_after_a_minute_it_is_right_to_a_fifth(
    monkeypatch: pytest.MonkeyPatch, compile_seconds: float, step_seconds: float
) -> None:
    """Ten epochs, the last four at 1.8 times the pixels; every second one is evaluated for six seconds."""
    clock, each = 0.0, round(40 / step_seconds)
    monkeypatch.setattr(time, "perf_counter", lambda: clock)
    plan = TrainingPlan(10, each, 10 * each, 0, 32, evaluate_every_epochs=2, image_sizes=SIZES)
    remaining, said, reported = RemainingTime(plan, image_size=(32, 32)), [], 0.0
    remaining.on_start(step=0)
    for epoch in range(plan.epochs):
        size, began = plan.image_size(epoch), clock
        assert size is not None
        for step in range(epoch * each, (epoch + 1) * each):
            clock += step_seconds * size[0] ** 2 / 32**2 + compile_seconds * (step in (0, 6 * each))
            if clock - reported > 0.5:
                remaining.on_step(step + 1)
                said.append((clock, remaining.estimate()))
                reported = clock
        seconds, is_evaluated = clock - began, epoch % 2 == 1
        clock += 6.0 * is_evaluated
        remaining.on_epoch((epoch + 1) * each, train_seconds=seconds, is_evaluated=is_evaluated)
        said.append((clock, remaining.estimate()))
    late = [(then, estimate) for then, estimate in said if 60 < then < clock - 10]
    assert len(late) > 50
    for then, estimate in late:
        assert estimate == pytest.approx(clock - then, rel=0.2), then
    assert said[-1][1] == 0.0


def test_epochs_too_short_for_a_report_are_measured_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: clock)
    remaining = RemainingTime(TrainingPlan(100, 3, 300, 0, 32), image_size=(8, 8))
    remaining.on_start(step=0)
    assert remaining.estimate() is None
    for epoch in range(1, 11):
        clock += 0.4
        remaining.on_epoch(3 * epoch, train_seconds=0.3, is_evaluated=True)
    assert remaining.estimate() == pytest.approx(36.0)
