"""Two gloo processes train as one does, also from each other's checkpoints."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.training.conftest import TINY, read_metrics
from tests.training.test_kill import done_steps
from vit.bundle import load_bundle

# Noise of the layers' own (drop path) differs between ranks; what the data brings does not
OVERRIDES = [
    *TINY,
    "model.drop_path_rate=0.0",
    "augment.mixup=0.2",
    "augment.cutout=3",
    "train.batch_size=128",
    "train.epochs=5",
    "optimizer.lr=1e-3",
    "optimizer.muon_lr=1e-3",
]


def launch(directory: Path, cache: Path, *arguments: str, processes: int) -> subprocess.Popen[str]:
    empty = directory.parent / "empty.yaml"
    empty.touch()
    run = [
        "vit",
        "train",
        str(empty),
        *OVERRIDES,
        f"data.cache_dir={cache}",
        "--output",
        str(directory),
        *arguments,
    ]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    return subprocess.Popen(
        [sys.executable, "-m", *(torchrun if processes > 1 else []), *run],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_bundle(directory).model.state_dict()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "alone"
    finish(launch(directory, cache, processes=1))
    assert read_metrics(directory)[-1]["step"] == 50
    return directory


def halfway(directory: Path) -> None:
    """Take the last checkpoint away, so that a run goes on from the one before."""
    for path in (directory / "checkpoints").glob("step-*.sharded"):
        if int(path.name.split("-")[1]) > 40:
            shutil.rmtree(path)


def assert_close(first: Path, second: Path) -> None:
    ours, theirs = weights(first), weights(second)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-5, rtol=0)
    for row, other in zip(read_metrics(first), read_metrics(second), strict=True):
        assert row == pytest.approx(other, abs=1e-3)


def test_two_processes_equal_one(alone: Path, cache: Path, tmp_path: Path) -> None:
    finish(launch(tmp_path / "two", cache, processes=2))
    assert_close(alone, tmp_path / "two")


def test_two_processes_that_share_the_weights_equal_one_also_when_one_goes_on(
    cache: Path, tmp_path: Path
) -> None:
    sharded = ["train.parallel=fsdp", "optimizer.name=adamw", "train.checkpoint_every_steps=25"]
    sharded += ["train.attention_maps=8"]  # asked for, and not waited for by the process that is alone in it
    finish(launch(tmp_path / "alone", cache, *sharded, processes=1))
    finish(launch(tmp_path / "two", cache, *sharded, processes=2))
    assert_close(tmp_path / "alone", tmp_path / "two")
    halfway(tmp_path / "two")
    shutil.copytree(tmp_path / "two", tmp_path / "two again")
    finish(launch(tmp_path / "two again", cache, *sharded, "--resume", processes=2))
    for name, tensor in weights(tmp_path / "two").items():
        assert torch.equal(weights(tmp_path / "two again")[name], tensor)
    finish(launch(tmp_path / "two", cache, *sharded, "--resume", processes=1))
    assert_close(tmp_path / "alone", tmp_path / "two")
    halfway(tmp_path / "alone")
    finish(launch(tmp_path / "alone", cache, *sharded, "--resume", processes=2))
    assert_close(tmp_path / "alone", tmp_path / "two")


def test_a_dead_rank_ends_the_job_and_another_world_size_goes_on(
    alone: Path, cache: Path, tmp_path: Path
) -> None:
    job = launch(tmp_path / "run", cache, "train.checkpoint_every_steps=1", processes=2)
    deadline = time.monotonic() + 120
    while done_steps(tmp_path / "run") < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    children = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    died = time.monotonic()
    job.communicate(timeout=60)
    assert job.returncode != 0
    assert time.monotonic() - died < 30
    assert 5 <= done_steps(tmp_path / "run") < 50
    finish(launch(tmp_path / "run", cache, "train.checkpoint_every_steps=1", "--resume", processes=1))
    assert_close(alone, tmp_path / "run")
