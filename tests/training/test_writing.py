"""Training goes on while its files are written."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import vit
from tests.training.conftest import MakeRun, read_metrics
from vit.bundle import load_bundle
from vit.training.identity import compute_run_id
from vit.training.observers import Observer


class StepsDone(Observer):
    """Sets an event after a number of steps."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.is_done = threading.Event()

    def on_step(self, metrics: dict[str, Any]) -> None:
        if metrics["step"] == self.step:
            self.is_done.set()


@pytest.mark.parametrize(
    ("slow_file", "step"),
    [("step-00000002", 3), ("model.safetensors", 6), ("metrics.jsonl", 6)],
)
def test_steps_do_not_wait_for_the_disk(
    make_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slow_file: str,
    step: int,
) -> None:
    """A disk that takes until a later step for one file: an epoch has five steps, every second one a
    checkpoint."""
    run = make_run(tmp_path, "train.checkpoint_every_steps=2", "train.max_steps=8")
    observer = StepsDone(step)
    run.trainer.observers.append(observer)
    fsync = os.fsync
    waits: list[bool] = []

    def flush_late(descriptor: int) -> None:
        # under its temporary name
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        if not waits and name.startswith(f".{slow_file}"):
            waits.append(observer.is_done.wait(60))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flush_late)
    run.trainer.train()
    assert waits == [True]
    assert [line["step"] for line in read_metrics(tmp_path)] == [5, 8]
    assert load_bundle(tmp_path).metadata["run_id"] == compute_run_id(run.trainer.identity)


def test_a_disk_that_is_full_ends_the_run_and_leaves_what_was_saved(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, "train.checkpoint_every_steps=2")
    fsync = os.fsync

    def fail_later(descriptor: int) -> None:
        if any(tmp_path.glob("checkpoints/step-00000004-*")):
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_later)
        with pytest.raises(OSError, match="No space left"):
            run.trainer.train()
    # the flush of its directory failed; what it was to be followed by isn't there
    names = sorted(path.name[:13] for path in tmp_path.glob("checkpoints/step-*"))
    assert names == ["step-00000002", "step-00000004"]
    assert not (tmp_path / "model.safetensors").exists()

    resumed = make_run(tmp_path, "train.checkpoint_every_steps=2")
    assert resumed.trainer.resume()
    assert resumed.trainer.progress.step == 4
    resumed.trainer.train()
    assert [line["step"] for line in read_metrics(tmp_path)] == [5, 10, 15]


def test_a_loss_of_the_user_that_is_nan_stops_with_the_step_and_what_is_kept(
    tmp_path: Path,
) -> None:
    calls = []

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        calls.append(1)
        return nn.functional.cross_entropy(logits, targets) * (
            float("nan") if len(calls) > 9 else 1
        )

    with pytest.raises(ValueError, match=r"step \d+: the loss .* not finite, and the checkpoint"):
        vit.train(
            "digits",
            output=tmp_path / "run",
            overrides=["train.checkpoint_every_steps=1", "train.max_steps=20", "augment.mixup=0"],
            loss=loss,
        )
