"""How 1, 2, 4 and 8 processes train on this machine.

    python research/processes.py --output benchmarks/results

Every run is the same one of a small ViT on the digits, in float32, started by torchrun with gloo.
Of each: the largest difference of a step's loss to that of one process, steps/s from the 11th step
to the last, what a process exchanges in a step (counted where torch dispatches it), seconds from
the start of torchrun to the end of the first step, and from kill -9 of a process to the end of the
next step.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from conditions import describe_conditions, write_result
from study_tables import build_processes_table

from tests.training.recorded import RUN, measure_overlap, read_steps, train_recorded

NAME = "processes"


def count_sent_bytes(exchanged: dict[str, int], world_size: int) -> float:
    """What a process sends to others in rings: an all-reduce passes everything round twice, an
    all-gather once."""
    return (
        (world_size - 1)
        / world_size
        * sum(size * (1 + (name == "allreduce_")) for name, size in exchanged.items())
    )


def start(directory: Path, world_size: int, *arguments: str) -> subprocess.Popen[bytes]:
    """The run as a job of torchrun, which starts it once more where a process ends."""
    directory.mkdir()
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    worker = [str(Path(__file__)), "--worker", str(directory), *arguments]
    command = [sys.executable, "-m", *torchrun, "--max-restarts=1", *worker]
    with (directory.parent / f"{directory.name}.log").open("wb") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def finish(job: subprocess.Popen[bytes], directory: Path) -> list[dict[str, Any]]:
    if job.wait():
        raise SystemExit((directory.parent / f"{directory.name}.log").read_text())
    return read_steps(directory)


def wait_for_step(job: subprocess.Popen[bytes], directory: Path, number: int) -> dict[str, Any]:
    """The line number `number`, once it is there."""
    while len(steps := read_steps(directory)) < number:
        if job.poll() is not None:
            raise SystemExit((directory.parent / f"{directory.name}.log").read_text())
        time.sleep(0.02)
    return steps[number - 1]


def measure_restart(folder: Path, world_size: int) -> float:
    """Seconds from kill -9 of the last process to the end of the job's next step."""
    directory = folder / "killed"
    job = start(directory, world_size, "train.epochs=1000", "train.checkpoint_every_steps=1")
    try:
        wait_for_step(job, directory, 5)
        children = subprocess.run(
            ["pgrep", "-P", str(job.pid)], capture_output=True, text=True
        ).stdout.split()
        os.kill(int(children[-1]), signal.SIGKILL)
        killed_at = time.time()
        time.sleep(1)  # what was being done is done
        next_one = len(read_steps(directory)) + 1
        return float(wait_for_step(job, directory, next_one)["time"]) - killed_at
    finally:
        job.terminate()
        job.wait()


def measure(
    folder: Path, world_size: int, *, steps: int, alone: list[float] | None
) -> dict[str, Any]:
    """All figures of one number of processes; `alone`: the losses of one process."""
    folder.mkdir()
    length = [f"train.max_steps={steps}", "train.epochs=1000", "train.evaluate_every_epochs=1000"]
    started_at = time.time()
    plain = finish(start(folder / "plain", world_size, *length), folder / "plain")
    losses = [line["loss"] for line in plain]
    found: dict[str, Any] = {
        "losses": losses,
        "loss_difference": max(abs(a - b) for a, b in zip(losses, alone or losses, strict=True)),
        "steps_per_second": round((steps - 11) / (plain[-1]["time"] - plain[10]["time"]), 2),
        "start_seconds": round(plain[0]["time"] - started_at, 1),
    }
    if world_size > 1:
        directory = folder / "counted"
        step = finish(start(directory, world_size, "--count", "train.max_steps=3"), directory)[1]
        found |= {
            "calls": step["calls"],
            "bytes": step["bytes"],
            "overlap": measure_overlap(step["order"]),
        }
        found["sent_bytes"] = round(count_sent_bytes(step["bytes"], world_size))
        found["restart_seconds"] = round(measure_restart(folder, world_size), 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help=f"folder for {NAME}-<machine>.json")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument(
        "--worker", type=Path, help=argparse.SUPPRESS
    )  # one process of a run: its directory
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)
    arguments, overrides = parser.parse_known_args()
    if arguments.worker:
        train_recorded(arguments.worker, overrides, count=arguments.count)
        return
    machine = describe_conditions(torch.device("cpu"))
    runs, alone = [], None
    with TemporaryDirectory() as temporary:
        for world_size in (1, *arguments.processes):
            folder = Path(temporary) / str(world_size)
            found = measure(folder, world_size, steps=arguments.steps, alone=alone)
            alone = alone or found["losses"]
            runs.append({"processes": world_size, "parallel": "ddp", **found})
            print(json.dumps({key: value for key, value in runs[-1].items() if key != "losses"}))
    result = {"machine": machine, "overrides": RUN, "steps": arguments.steps, "runs": runs}
    print(build_processes_table(result))
    if arguments.output:
        print(write_result(arguments.output, NAME, result))


if __name__ == "__main__":
    main()
