"""A run whose machine is slower than its plan ends within its minutes, and is resumed like any
other."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.training.conftest import MakeRun, flatten, read_metrics, run_until
from tests.training.test_resume import assert_equal_runs
from vit.training import trainer as trainer_module
from vit.training.run import Run
from vit.training.train_step import StepResult


class Clock:
    """Time that passes with the steps alone."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(trainer_module.time, "perf_counter", clock.perf_counter)
    return clock


def slow_down(run: Run, clock: Clock, *, seconds: list[float]) -> None:
    """Let each step of a run take `seconds[step]`, the last of them for all that follow."""
    train_step = run.trainer.train_step

    class Slow(train_step.__class__):  # type: ignore[name-defined, misc]
        def __call__(self, images: Tensor, targets: Tensor) -> StepResult:
            clock.seconds += seconds[min(self.num_steps, len(seconds) - 1)]
            result: StepResult = super().__call__(images, targets)
            return result

    train_step.__class__ = Slow


# eight epochs of five steps, planned to take a second each
LENGTH = ["train.epochs=8", f"train.max_minutes={40 / 60}", "schedule.name=linear"]


@pytest.mark.parametrize(
    ("seconds", "num_steps"),
    [
        # as planned, or faster: nothing changes
        ([1.0], 40),
        pytest.param([0.5], 40, marks=pytest.mark.extended),
        # half as fast from the first step on, and from the middle on
        ([2.0], 20),
        ([1.0] * 20 + [2.0], 31),
        # the first step compiles, say: what was taken from the length is given back, to within 5 %
        ([5.0] + [0.9] * 50, 38),
        # one epoch takes longer than all were to
        ([10.0], 4),
    ],
)
def test_it_ends_within_its_minutes(
    make_run: MakeRun, tmp_path: Path, clock: Clock, seconds: list[float], num_steps: int
) -> None:
    run = make_run(tmp_path, *LENGTH)
    slow_down(run, clock, seconds=seconds)
    run.trainer.train()
    assert run.trainer.progress.step == num_steps
    assert clock.seconds <= 1.15 * 40
    # validated and kept at its end, where the learning rate has fallen to nearly nothing
    last = read_metrics(tmp_path)[-1]
    assert last["step"] == num_steps
    assert last["learning_rate"] < 0.1 * run.data.config.optimizer.lr


def test_a_plan_of_many_times_its_minutes_ends_within_them(
    make_run: MakeRun, tmp_path: Path, clock: Clock
) -> None:
    """A tenth of its steps takes a hundred times the minutes."""
    run = make_run(tmp_path, *LENGTH, "train.epochs=8000")
    slow_down(run, clock, seconds=[1.0])
    run.trainer.train()
    assert run.trainer.progress.step == 40
    assert read_metrics(tmp_path)[-1]["learning_rate"] < 0.1 * run.data.config.optimizer.lr


CHECKED = [*LENGTH, "train.checkpoint_every_steps=2"]


@pytest.fixture(scope="module")
def whole(
    make_run: MakeRun, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Tensor]]:
    """A run of half the planned steps, and its state at its end."""
    directory, clock = tmp_path_factory.mktemp("runs") / "whole", Clock()
    run = make_run(directory, *CHECKED)
    slow_down(run, clock, seconds=[2.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module.time, "perf_counter", clock.perf_counter)
        run.trainer.train()
    assert run.trainer.progress.step == 20
    return directory, flatten(run.trainer.train_step.state_dict())


@pytest.mark.parametrize(
    "steps", [(3, 6, 13, 19), pytest.param((5, 7), marks=pytest.mark.extended)]
)
def test_resumed_run_has_the_length_that_was_decided(
    make_run: MakeRun,
    whole: tuple[Path, dict[str, Tensor]],
    tmp_path: Path,
    clock: Clock,
    steps: tuple[int, ...],
) -> None:
    for step in steps:
        run = make_run(tmp_path / "broken", *CHECKED)
        slow_down(run, clock, seconds=[2.0])
        run.trainer.resume()
        run_until(run, step)
    run = make_run(tmp_path / "broken", *CHECKED)
    slow_down(run, clock, seconds=[2.0])
    run.trainer.resume()
    run.trainer.train()
    directory, whole_state = whole
    assert_equal_runs(directory, tmp_path / "broken")
    state = flatten(run.trainer.train_step.state_dict())
    assert all(torch.equal(whole_state[name], state[name]) for name in whole_state)
