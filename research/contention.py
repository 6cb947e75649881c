"""Training throughput beside processes that keep a core busy each.

    python research/contention.py --output benchmarks/results

Images a second of a training step (forward, backward, update) of three recipes on random images,
alone and beside one and two busy processes. Each step is taken in two ways, in turn in one process:
the threads of every operation wait for one another (OpenMP, `GOMP_SPINCOUNT=10000` as in `vit
train`), or each thread takes a part of the batch and they meet once a step, as `vit train` does on
a CPU. With n cores and k busy processes, threads that are scheduled equally get n / (n + k) of the
machine; one that leaves a thread a core to itself may get more.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from conditions import describe_conditions, write_result
from study_tables import build_contention_table

from vit.config import load_config
from vit.runtime.arguments import as_pair
from vit.runtime.memory import keep_freed_memory
from vit.runtime.processes import Process
from vit.training.model import build_model
from vit.training.recipe import find_recipe
from vit.training.run import build_plan, build_train_step
from vit.training.train_step import TrainStep

NAME = "contention"
RECIPES = ("digits", "cifar10/cpu", "imagenette/cpu")
WAYS = {"operations": "threads share every operation", "parts": "threads share the batch"}


def build(recipe: str) -> tuple[TrainStep, torch.Tensor, torch.Tensor]:
    """A recipe's step, and a batch for it."""
    config = load_config(find_recipe(recipe))
    model, _ = build_model(config, num_classes=10)
    size, batch_size = (
        as_pair(config.data.image_size, name="data.image_size"),
        config.train.batch_size,
    )
    device = torch.device("cpu")
    plan = build_plan(config, model, steps_per_epoch=100, batch_size=batch_size)
    step = build_train_step(config, model, plan=plan, process=Process(), device=device)
    return step, torch.randn(batch_size, 3, *size), torch.randint(10, (batch_size,))


def measure(step: TrainStep, batch: tuple[torch.Tensor, torch.Tensor], *, seconds: float) -> float:
    """Images a second."""
    step(*batch)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        step(*batch)
        count += len(batch[1])
    return count / (time.perf_counter() - start)


def measure_recipe(recipe: str, *, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Way → busy processes → median of the rounds."""
    step, *batch = build(recipe)
    parts, rates = step.threads, {way: {busy: [] for busy in ("0", "1", "2")} for way in WAYS}
    for _ in range(rounds):
        for busy in ("0", "1", "2"):
            others = [
                subprocess.Popen([sys.executable, "-c", "while True: pass"])
                for _ in range(int(busy))
            ]
            try:
                for way in WAYS:
                    step.threads = parts if way == "parts" else None
                    rates[way][busy].append(measure(step, (batch[0], batch[1]), seconds=seconds))
            finally:
                for other in others:
                    other.kill()
                    other.wait()
    return {
        way: {busy: round(statistics.median(found), 1) for busy, found in of_way.items()}
        for way, of_way in rates.items()
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="of each way beside each number of processes"
    )
    parser.add_argument("--output", type=Path, help="folder for contention-<machine>.json")
    arguments = parser.parse_args()
    machine = describe_conditions("cpu")
    keep_freed_memory()
    options = {"rounds": arguments.rounds, "seconds": arguments.seconds}
    result = {
        "machine": machine,
        "images_per_second": {recipe: measure_recipe(recipe, **options) for recipe in RECIPES},
    }
    print(build_contention_table(result))
    if arguments.output:
        print(write_result(arguments.output, NAME, result))


if __name__ == "__main__":
    main()
