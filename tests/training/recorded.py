"""A small run of one or more processes on the digits that notes the loss of each step."""

import json
import time
from pathlib import Path
from typing import Any

import vit
from vit.training.observers import Observer

RUN = [
    "data.name=digits",
    "data.image_size=8",
    "data.pipeline=resident",
    "model.patch_size=2",
    "model.embed_dim=128",
    "model.depth=6",
    "model.num_heads=4",
    "optimizer.name=adamw",
    # at 1e-3 this run is chaotic: two micro-batches in one process change its losses by 2e-5 too,
    # eight by 3e-4
    "optimizer.lr=1e-4",
    "train.batch_size=64",
    "train.precision=float32",
    "train.compile=false",
    "train.device=cpu",
]
STEPS_FILE = "steps.jsonl"


class Recorder(Observer):
    """A line for each step: when it ended, and its loss."""

    is_essential = True

    def __init__(self, directory: Path) -> None:
        self.path = directory / STEPS_FILE

    def on_step(self, metrics: dict[str, Any]) -> None:
        line = {"step": metrics["step"], "loss": float(metrics["loss"]), "time": time.time()}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def train_recorded(directory: Path, overrides: list[str]) -> None:
    """One process's part of a run into `directory`, from its last checkpoint where there is one."""
    vit.train(
        {},
        output=directory,
        overrides=[*RUN, *overrides],
        resume=True,
        callbacks=[Recorder(directory)],
    )


def read_steps(directory: Path) -> list[dict[str, Any]]:
    """What `Recorder` wrote, without a line that is being written."""
    path = directory / STEPS_FILE
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
