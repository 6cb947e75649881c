"""Small runs on the digits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vit.config import load_config
from vit.training.observers import TensorBoard
from vit.training.run import Run, build_run

# five steps an epoch
TINY = [
    "data.classes=[0,1,2]",
    "data.image_size=8",
    "model.patch_size=4",
    "model.embed_dim=16",
    "model.depth=2",
    "model.num_heads=2",
    "model.drop_path_rate=0.2",
    "augment.crop_padding=1",
    "augment.flip=random",
    "optimizer.name=muon",
    "train.batch_size=76",
    "train.epochs=3",
    "train.ema_decay=0.9",
    "train.clip_grad=1.0",
    "train.precision=float32",
]

MakeRun = Callable[..., Run]


@pytest.fixture(scope="session")
def make_run() -> MakeRun:
    """A tiny run into a directory; more overrides come behind."""

    def make(directory: Path, *overrides: str) -> Run:
        directory.mkdir(parents=True, exist_ok=True)
        config = load_config(None, [*TINY, *overrides])
        run = build_run(config, directory=directory, device_name="cpu")
        run.trainer.observers = [TensorBoard(directory)]
        return run

    return make


class Killed(Exception):
    """Stands for the end of the process: nothing is saved when it is raised."""


def run_until(run: Run, step: int) -> None:
    """Train, and die in the middle of step number `step`."""
    whole_step = run.trainer.train_step.__class__.__call__
    count = 0

    class Dying(run.trainer.train_step.__class__):  # type: ignore[name-defined, misc]
        def __call__(self, images: Tensor, targets: Tensor) -> Any:
            nonlocal count
            if run.trainer.progress.step == step - 1:
                raise Killed
            count += 1
            return whole_step(self, images, targets)

    run.trainer.train_step.__class__ = Dying
    with pytest.raises(Killed):
        run.trainer.train()


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without the times."""
    clocks = {"images_per_second", "elapsed_seconds"}
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key not in clocks}
        for line in lines
    ]


def read_curves(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's scalars, as its own reader gives them, without what a clock says."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if "second" not in tag]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def flatten(value: Any, name: str = "") -> dict[str, Tensor]:
    """Every tensor in a nested state, by its path."""
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return {name: torch.tensor(value)} if isinstance(value, int | float) else {}
    return {
        key: tensor
        for place, child in items
        for key, tensor in flatten(child, f"{name}/{place}").items()
    }
