"""Two gloo processes train as one does, also from each other's checkpoints."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import Launcher, Outcome
from tests.training.conftest import TINY, read_metrics
from tests.training.test_kill import done_steps
from vit.bundle import load_bundle

# Noise of the layers' own (drop path) differs between ranks; what the data brings does not
OVERRIDES = [
    *TINY,
    "model.drop_path_rate=0.0",
    "augment.mixup=0.2",
    "augment.cutout=3",
    "data.classes=null",
    "train.batch_size=128",
    "train.epochs=5",
    "optimizer.lr=1e-3",
    "optimizer.muon_lr=1e-3",
]


Start = Callable[..., subprocess.Popen[str]]
Train = Callable[..., Outcome]


@pytest.fixture(scope="module")
def start(cli: Launcher, empty_yaml: Path) -> Start:
    """start(directory, …, processes=n) trains into it with so many processes."""

    def start(directory: Path, *arguments: str, processes: int) -> subprocess.Popen[str]:
        train = ("train", empty_yaml, *OVERRIDES, "--output", directory)
        return cli.start(*train, *arguments, processes=processes, stdout=subprocess.DEVNULL)

    return start


@pytest.fixture(scope="module")
def train(cli: Launcher, start: Start) -> Train:
    return lambda *arguments, processes: cli.finish(start(*arguments, processes=processes))


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_bundle(directory).model.state_dict()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, cli: Launcher, empty_yaml: Path) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "alone"
    cli.succeed("train", empty_yaml, *OVERRIDES, "--output", directory)
    assert read_metrics(directory)[-1]["step"] == 50
    return directory


def list_children(job: subprocess.Popen[str]) -> list[int]:
    """The processes that torchrun started."""
    found = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True)
    return [int(number) for number in found.stdout.split()]


def assert_close(first: Path, second: Path) -> None:
    ours, theirs = weights(first), weights(second)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-5, rtol=0)
    for metrics, other in zip(read_metrics(first), read_metrics(second), strict=True):
        assert metrics == pytest.approx(other, abs=1e-3)


@pytest.mark.chaos
def test_two_processes_equal_one(alone: Path, train: Train, tmp_path: Path) -> None:
    train(tmp_path / "two", processes=2)
    assert_close(alone, tmp_path / "two")


@pytest.mark.chaos
def test_a_dead_rank_ends_the_job_and_another_world_size_continues(
    alone: Path, start: Start, train: Train, tmp_path: Path
) -> None:
    job = start(tmp_path / "run", "train.checkpoint_every_steps=1", processes=2)
    deadline = time.monotonic() + 120
    while done_steps(tmp_path / "run") < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(list_children(job)[-1], signal.SIGKILL)
    died = time.monotonic()
    job.communicate(timeout=60)
    assert job.returncode != 0
    assert time.monotonic() - died < 30
    assert 5 <= done_steps(tmp_path / "run") < 50
    train(tmp_path / "run", "train.checkpoint_every_steps=1", "--resume", processes=1)
    assert_close(alone, tmp_path / "run")
