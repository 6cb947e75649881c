"""Processes name who is lost."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import Launcher
from tests.training.conftest import TINY
from tests.training.test_kill import done_steps


@pytest.mark.chaos
def test_a_process_that_ends_is_named_in_time(cli: Launcher, tmp_path: Path) -> None:
    """Without torchrun, which would end the others itself."""
    settings = ["digits", *TINY, "optimizer.name=adamw", "train.epochs=1000"]
    settings += ["train.batch_size=96", "train.ema_decay=null", "train.checkpoint_every_steps=1"]
    run = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world: list[subprocess.Popen[str]] = [
        cli.start(
            "train", *settings, "--output", run, env=place | {"RANK": rank, "LOCAL_RANK": rank}
        )
        for rank in "012"
    ]
    deadline = time.monotonic() + 60
    while done_steps(run) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lost_at = time.monotonic()
    os.kill(world[1].pid, signal.SIGKILL)
    errors = [world[rank].communicate(timeout=30)[1] for rank in (0, 2)]
    seconds = time.monotonic() - lost_at
    world[1].communicate()
    assert [world[rank].returncode for rank in (0, 2)] == [75, 75]
    assert seconds < 5
    for rank, text in zip((0, 2), errors, strict=True):
        (line,) = [line for line in text.splitlines() if "or hangs" in line]
        assert line.startswith(f"another of the 3 processes has ended or hangs (process {rank}: ")
        assert line.endswith("; continue with --resume")
