"""1, 2, 4 and 8 processes train alike, and name who is lost."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.conftest import TINY
from tests.training.recorded import read_steps, train_recorded
from tests.training.worlds import join_world, run_command, start_world

SETTINGS = [
    "model.embed_dim=32",
    "model.depth=3",
    "model.global_pool=avg",
    "train.batch_size=64",
    "train.max_steps=24",
    "optimizer.lr=5e-3",
]

Train = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """train(size, …): a line for each step of the run of so many processes, which is done once."""
    runs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}

    def train(size: int, *overrides: str) -> list[dict[str, Any]]:
        if (size, *overrides) not in runs:
            directory = tmp_path_factory.mktemp("world")
            world = start_world(train_recorded, directory, [*SETTINGS, *overrides], size=size)
            assert join_world(world) == [0] * size
            runs[size, *overrides] = read_steps(directory)
        return runs[size, *overrides]

    return train


@pytest.mark.chaos
@pytest.mark.parametrize("size", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_any_number_of_processes_has_the_loss_curve_of_one(train: Train, size: int) -> None:
    losses = [line["loss"] for line in train(1)]
    assert len(losses) == 24
    assert losses[-1] < losses[0] - 0.1
    assert [line["loss"] for line in train(size)] == pytest.approx(losses, abs=1e-5)


@pytest.mark.chaos
def test_two_processes_scale_the_loss_of_float16_alike(train: Train) -> None:
    half = "train.precision=float16"
    losses = [line["loss"] for line in train(1, half)]
    assert [line["loss"] for line in train(2, half)] == pytest.approx(losses, abs=2e-3)
    assert losses == pytest.approx([line["loss"] for line in train(1)], abs=2e-3)


@pytest.mark.chaos
def test_a_process_that_ends_is_named_in_time(tmp_path: Path) -> None:
    settings = ["digits", *TINY, "optimizer.name=adamw", "train.epochs=1000"]
    settings += ["train.batch_size=96", "train.ema_decay=null", "train.checkpoint_every_steps=1"]
    run = tmp_path / "run"
    world = start_world(run_command, run, *settings, size=3)
    deadline = time.monotonic() + 60
    while not any(path.name >= "step-00000003" for path in (run / "checkpoints").glob("step-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lost_at = time.monotonic()
    os.kill(world[1].pid or 0, signal.SIGKILL)
    codes = join_world([world[0], world[2]], timeout=30)
    seconds = time.monotonic() - lost_at
    world[1].kill()
    assert codes == [75, 75]
    assert seconds < 5
    for rank in ("0", "2"):
        lines = (tmp_path / f"{rank}.txt").read_text().splitlines()
        (line,) = [text for text in lines if "or hangs" in text]
        assert line.startswith(f"another of the 3 processes has ended or hangs (process {rank}: ")
        assert line.endswith("; continue with --resume")
