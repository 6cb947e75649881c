"""Processes name who is lost."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.training.conftest import TINY
from tests.training.worlds import join_world, run_command, start_world


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
