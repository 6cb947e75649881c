"""A small run of one or more processes on the digits that notes each step: its loss, and what the
processes exchanged."""

import json
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

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
# which argument holds what is exchanged
_PAYLOAD = {"allreduce_": 0, "_allgather_base_": 0}


class ExchangeCount(TorchDispatchMode):
    """Counts calls and bytes of what processes exchange; `order` also has the matrix products
    between them."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.order: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.split("::")[1]
        if "c10d" in function.namespace and name in _PAYLOAD:
            payload = args[_PAYLOAD[name]]
            tensors = payload if isinstance(payload, list | tuple) else [payload]
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.calls[name] += 1
            self.bytes[name] += size
            self.order.append((name, size))
        elif name in ("mm", "addmm", "bmm"):
            self.order.append((name, 0))
        return function(*args, **(kwargs or {}))


class Recorder(Observer):
    """A line for each step: when it ended, its loss, and what was exchanged since the last one."""

    is_essential = True

    def __init__(self, directory: Path, count: ExchangeCount | None = None) -> None:
        self.path, self.count = directory / STEPS_FILE, count

    def on_step(self, metrics: dict[str, Any]) -> None:
        line = {"step": metrics["step"], "loss": float(metrics["loss"]), "time": time.time()}
        if self.count is not None:
            line |= {
                "calls": self.count.calls,
                "bytes": self.count.bytes,
                "order": self.count.order,
            }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self.count is not None:
            self.count.reset()


def train_recorded(directory: Path, overrides: list[str], *, count: bool) -> None:
    """One process's part of a run into `directory`, from its last checkpoint where there is one."""
    exchanged = ExchangeCount() if count else None
    with exchanged or nullcontext():
        callbacks = [Recorder(directory, exchanged)]
        vit.train(
            {}, output=directory, overrides=[*RUN, *overrides], resume=True, callbacks=callbacks
        )


def read_steps(directory: Path) -> list[dict[str, Any]]:
    """What `Recorder` wrote, without a line that is being written."""
    path = directory / STEPS_FILE
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def measure_overlap(order: list[tuple[str, int]]) -> float:
    """Of the bytes of gradients in a step, the fraction that is exchanged while backward products
    are still to come."""
    products = [place for place, (name, _) in enumerate(order) if name in ("mm", "addmm", "bmm")]
    gradients = [
        (place, size)
        for place, (name, size) in enumerate(order)
        if name == "allreduce_" and size > 100
    ]
    total = sum(size for _, size in gradients)
    return sum(size for place, size in gradients if place < products[-1]) / total if total else 0.0
