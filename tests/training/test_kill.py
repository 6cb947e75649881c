"""Real processes, killed for real: the resumed run equals the uninterrupted one."""

import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Launcher
from tests.training.conftest import TINY, read_curves, read_metrics
from tests.training.test_resume import assert_equal_runs

OVERRIDES = [*TINY, "train.epochs=12", "train.checkpoint_every_steps=1"]
STEPS = 60


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(cli: Launcher, empty_yaml: Path) -> Start:
    """start(directory, …) trains into it, as a program of its own."""

    def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
        return cli.start("train", empty_yaml, *OVERRIDES, "--output", directory, *arguments)

    return start


def done_steps(directory: Path) -> int:
    names = [path.name for path in (directory / "checkpoints").glob("step-*.pt")]
    return max((int(name.split("-")[1]) for name in names), default=0)


def wait_for(
    process: subprocess.Popen[str], directory: Path, *, step: int, while_writing: bool
) -> None:
    """Until that many steps are saved, then, if wanted, until the next checkpoint is being
    written."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if done_steps(directory) >= step:
            if not while_writing or any((directory / "checkpoints").glob(".step-*.tmp")):
                return
        else:
            time.sleep(0.002)


@pytest.mark.parametrize(
    ("pipeline", "kills"),
    [
        ("resident", 1),
        pytest.param("resident", 3, marks=pytest.mark.chaos),
        pytest.param("cached", 3, marks=pytest.mark.chaos),
        pytest.param("resident", 50, marks=pytest.mark.slow),
    ],
)
def test_kill_9_loses_nothing(
    cli: Launcher, start: Start, empty_yaml: Path, tmp_path: Path, pipeline: str, kills: int
) -> None:
    overrides = [f"data.pipeline={pipeline}"]
    steps = STEPS
    if kills == 1:
        overrides.append("train.epochs=4")
        steps = 20
    if pipeline == "cached":
        overrides += ["augment.crop_padding=0", "augment.resized_crop_scale=[0.3,1]"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    # what isn't killed needs no process of its own
    train = ("train", empty_yaml, *OVERRIDES, *overrides, "--output")
    cli.succeed(*train, whole)
    rng = random.Random(kills)
    writing = 0
    for number, step in enumerate(sorted(rng.sample(range(steps - 5), kills))):
        process = start(broken, *overrides, "--resume")
        wait_for(process, broken, step=step, while_writing=number % 2 == 1)
        time.sleep(rng.random() * 0.01 * (number % 2 == 0))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        writing += any((broken / "checkpoints").glob(".step-*.tmp"))
    assert done_steps(broken) < steps, "killed too late to prove anything"
    cli.succeed(*train, broken, "--resume")
    assert_equal_runs(whole, broken)
    if kills >= 20:
        assert writing >= 1, "no kill fell into a checkpoint's own write"


@pytest.mark.chaos
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_asks_to_be_requeued(
    cli: Launcher, start: Start, tmp_path: Path, kind: signal.Signals
) -> None:
    process = start(tmp_path / "run")
    wait_for(process, tmp_path / "run", step=3, while_writing=False)
    process.send_signal(kind)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    step = done_steps(tmp_path / "run")
    assert 3 <= step < STEPS
    assert f"stopped after step {step}" in errors
    errors = cli.finish(start(tmp_path / "run", "--resume")).err
    assert f"resuming after step {step}" in errors
    assert read_metrics(tmp_path / "run")[-1]["step"] == STEPS
    assert [point for point, _ in read_curves(tmp_path / "run")["epoch/val_loss"]] == list(
        range(5, STEPS + 1, 5)
    )


@pytest.mark.chaos
def test_two_runs_cannot_write_one_directory(start: Start, tmp_path: Path) -> None:
    first = start(tmp_path / "run", "train.epochs=10000")
    wait_for(first, tmp_path / "run", step=1, while_writing=False)
    second = start(tmp_path / "run", "train.epochs=10000", "--resume")
    _, errors = second.communicate(timeout=60)
    first.kill()
    first.communicate(timeout=60)
    assert second.returncode == 2
    assert "another process is training" in errors
