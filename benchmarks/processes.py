"""How 1, 2, 4 and 8 processes train on this machine, with weights that all have (ddp) or share (fsdp).

    python benchmarks/processes.py --output benchmarks/results

Every run is the same one of a small ViT on the digits, in float32, started by torchrun with gloo. Of each: the largest
difference of a step's loss to that of one process, steps/s from the 11th step to the last, what a process exchanges in
a step (counted where torch dispatches it), seconds from the start of torchrun to the end of the first step, and from
kill -9 of a process to the end of the next step.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from conditions import describe_conditions, write_result
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import vit
from vit.explanation.faithfulness.map_metrics import to_markdown
from vit.training.observers import Observer

NAME = "processes"
RUN = [
    "data.name=digits",
    "data.image_size=8",
    "data.pipeline=resident",
    "model.patch_size=2",
    "model.embed_dim=128",
    "model.depth=6",
    "model.num_heads=4",
    "optimizer.name=adamw",
    # at 1e-3 this run is chaotic: two micro-batches in one process change its losses by 2e-5 too, eight by 3e-4
    "optimizer.lr=1e-4",
    "train.batch_size=64",
    "train.attention_maps=0",
    "train.precision=float32",
    "train.compile=false",
    "train.device=cpu",
]
STEPS_FILE = "steps.jsonl"
# which argument holds the whole
_PAYLOAD = {"allreduce_": 0, "all_reduce": 0, "_allgather_base_": 0, "_reduce_scatter_base_": 1}


class ExchangeCount(TorchDispatchMode):
    """Counts calls and bytes of what processes exchange; `order` also has the matrix products between them."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.order: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it consists of comes by itself
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
            line |= {"calls": self.count.calls, "bytes": self.count.bytes, "order": self.count.order}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self.count is not None:
            self.count.reset()


def train_recorded(directory: Path, overrides: list[str], *, count: bool) -> None:
    """One process's part of a run into `directory`, from its last checkpoint where there is one."""
    exchanged = ExchangeCount() if count else None
    with exchanged or nullcontext():
        callbacks = [Recorder(directory, exchanged)]
        vit.train({}, output=directory, overrides=[*RUN, *overrides], resume=True, callbacks=callbacks)


def read_steps(directory: Path) -> list[dict[str, Any]]:
    """What `Recorder` wrote, without a line that is being written."""
    path = directory / STEPS_FILE
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def count_sent_bytes(exchanged: dict[str, int], world_size: int) -> float:
    """What a process sends to others in rings: an all-reduce passes everything round twice, the others once."""
    twice = ("allreduce_", "all_reduce")
    return (world_size - 1) / world_size * sum(size * (1 + (name in twice)) for name, size in exchanged.items())


def measure_overlap(order: list[tuple[str, int]]) -> float:
    """Of the bytes of gradients in a step, the fraction that is exchanged while backward products are still to come."""
    products = [place for place, (name, _) in enumerate(order) if name in ("mm", "addmm", "bmm")]
    gradients = [(place, size) for place, (name, size) in enumerate(order) if name != "_allgather_base_" and size > 100]
    total = sum(size for _, size in gradients)
    return sum(size for place, size in gradients if place < products[-1]) / total if total else 0.0


def start(directory: Path, world_size: int, parallel: str, *arguments: str) -> subprocess.Popen[bytes]:
    """The run as a job of torchrun, which starts it once more where a process ends."""
    directory.mkdir()
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}", "--max-restarts=1"]
    command = [sys.executable, "-m", *torchrun, str(Path(__file__)), "--worker", str(directory), *arguments]
    with (directory.parent / f"{directory.name}.log").open("wb") as log:
        command.append(f"train.parallel={parallel}")
        return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})


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


def measure_restart(folder: Path, world_size: int, parallel: str) -> float:
    """Seconds from kill -9 of the last process to the end of the job's next step."""
    directory = folder / "killed"
    job = start(directory, world_size, parallel, "train.epochs=1000", "train.checkpoint_every_steps=1")
    try:
        wait_for_step(job, directory, 5)
        children = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(children[-1]), signal.SIGKILL)
        killed_at = time.time()
        time.sleep(1)  # what was being done is done
        next_one = len(read_steps(directory)) + 1
        return float(wait_for_step(job, directory, next_one)["time"]) - killed_at
    finally:
        job.terminate()
        job.wait()


def measure(folder: Path, world_size: int, parallel: str, *, steps: int, alone: list[float] | None) -> dict[str, Any]:
    """All figures of one number of processes; `alone`: the losses of one process."""
    folder.mkdir()
    length = [f"train.max_steps={steps}", "train.epochs=1000", "train.evaluate_every_epochs=1000"]
    started_at = time.time()
    plain = finish(start(folder / "plain", world_size, parallel, *length), folder / "plain")
    losses = [line["loss"] for line in plain]
    found: dict[str, Any] = {
        "losses": losses,
        "loss_difference": max(abs(a - b) for a, b in zip(losses, alone or losses, strict=True)),
        "steps_per_second": round((steps - 11) / (plain[-1]["time"] - plain[10]["time"]), 2),
        "start_seconds": round(plain[0]["time"] - started_at, 1),
    }
    if world_size > 1:
        directory = folder / "counted"
        step = finish(start(directory, world_size, parallel, "--count", "train.max_steps=3"), directory)[1]
        found |= {"calls": step["calls"], "bytes": step["bytes"], "overlap": measure_overlap(step["order"])}
        found["sent_bytes"] = round(count_sent_bytes(step["bytes"], world_size))
        found["restart_seconds"] = round(measure_restart(folder, world_size, parallel), 1)
    return found


def build_table(result: dict[str, Any]) -> str:
    """The table of docs/benchmarks.md."""
    titles = ["processes", "loss, largest difference", "steps/s", "calls a step", "MB a step", "MB sent", "overlap"]
    rows = []
    for found in result["runs"]:
        exchanged = ["–"] * 4
        if "calls" in found:
            sizes = [sum(found["bytes"].values()) / 1e6, found["sent_bytes"] / 1e6]
            exchanged = [str(sum(found["calls"].values())), *[f"{size:.2f}" for size in sizes]]
            exchanged.append(f"{found['overlap']:.0%}")
        name = f"{found['processes']}, {found['parallel']}" if found["processes"] > 1 else "1"
        seconds = [f"{found['start_seconds']:.1f}", f"{found.get('restart_seconds', '–')}"]
        rows.append([name, f"{found['loss_difference']:.1e}", f"{found['steps_per_second']:.1f}", *exchanged, *seconds])
    machine = result["machine"]
    where = (
        f"{machine['device']}, commit {machine['commit']}, load {machine['load']} at the start; {result['steps']} steps"
    )
    return to_markdown([*titles, "start (s)", "restart (s)"], rows) + f"\n\n{where}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help=f"folder for {NAME}-<machine>.json")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # one process of a run: its directory
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)
    arguments, overrides = parser.parse_known_args()
    if arguments.worker:
        train_recorded(arguments.worker, overrides, count=arguments.count)
        return
    machine = describe_conditions(torch.device("cpu"))
    runs, alone = [], None
    with TemporaryDirectory() as temporary:
        for world_size, parallel in [(1, "ddp"), *[(n, p) for p in ("ddp", "fsdp") for n in arguments.processes]]:
            folder = Path(temporary) / f"{parallel}-{world_size}"
            found = measure(folder, world_size, parallel, steps=arguments.steps, alone=alone)
            alone = alone or found["losses"]
            runs.append({"processes": world_size, "parallel": parallel, **found})
            print(json.dumps({key: value for key, value in runs[-1].items() if key != "losses"}))
    result = {"machine": machine, "overrides": RUN, "steps": arguments.steps, "runs": runs}
    print(build_table(result))
    if arguments.output:
        print(write_result(arguments.output, NAME, result))


if __name__ == "__main__":
    main()
