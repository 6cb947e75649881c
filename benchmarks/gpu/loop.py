"""Where the time of a turn of the training loop goes: the host's and the whole of its parts, and the
device's kernels; as it is, captured, and with explicit attention.

    python benchmarks/gpu/loop.py IMAGES 24 --variants loop graph explicit --output FILE
"""

import argparse
import json
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from vit.config import load_config
from vit.data.random import seed_step
from vit.runtime.processes import Process
from vit.training.recipe import find_recipe
from vit.training.run import build_run
from vit.training.step_graphs import StepGraph

RECIPE = "cifar10/speedrun"
# Kernels that are listed.
_LISTED = 25


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(images: Path, variant: str, *, side: int, options: argparse.Namespace) -> Any:
    device, is_cuda = options.device, options.device == "cuda"
    torch.compiler.reset()
    config = load_config(
        find_recipe(RECIPE),
        ["data.name=folder", f"data.root={images}", f"train.device={device}", *options.overrides],
    )
    with tempfile.TemporaryDirectory() as folder:
        run = build_run(
            config, directory=Path(folder), process=Process(), device_name=device, observers=[]
        )
    step, loader = run.trainer.train_step, run.trainer.train_batches
    step.model.train()
    # decided by the variant
    step.graphs = None
    for block in step.module.blocks:
        block.attn.backend = "explicit" if variant == "explicit" else "fused"

    def list_batches() -> Any:
        for epoch in range(10**6):
            yield from loader.epoch(epoch, image_size=(side, side))

    batches = list_batches()
    kept = next(batches)
    start = time.perf_counter()
    for _ in range(4):
        step(kept.images, kept.targets)
    wait(device)
    result: dict[str, Any] = {"first_4_steps_seconds": time.perf_counter() - start}

    call: Callable[..., Any] = step
    if variant == "graph" and is_cuda:
        graph = StepGraph(step.run_on_device, step.optimizer, kept.images, kept.targets)

        def replay(images: Any, targets: Any) -> Any:
            step.set_schedule_values()
            step.num_steps += 1
            return graph.replay(images, targets)

        call = replay

    def take_step(batch: Any) -> None:
        seed_step(0, step.num_steps, 0)
        call(batch.images, batch.targets)

    def differentiate() -> None:
        step.optimizer.zero_grad()
        step.forward_backward(kept.images, kept.targets)

    parts: dict[str, Callable[[], Any]] = {
        "batch": lambda: next(batches),
        "step": lambda: take_step(kept),
        "loop": lambda: take_step(next(batches)),
    }
    if variant != "graph":
        differentiate()
        pair = step.forward_backward(kept.images, kept.targets)
        parts |= {"forward and backward": differentiate, "update": lambda: step.update(*pair)}
    for name, work in parts.items():
        work()
        wait(device)
        start = time.perf_counter()
        for _ in range(options.steps):
            work()
        host = time.perf_counter() - start
        wait(device)
        whole = time.perf_counter() - start
        result[name] = {
            "host_milliseconds": 1e3 * host / options.steps,
            "milliseconds": 1e3 * whole / options.steps,
        }

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities) as profiler:
        for _ in range(5):
            take_step(next(batches))
        wait(device)
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in profiler.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name[:90]] += event.device_time / 5e3
            counts[event.name[:90]] += 1
    result["kernel_milliseconds"] = sum(times.values())
    result["kernels_a_step"] = sum(counts.values()) / 5
    result["kernels"] = [
        {"name": name, "milliseconds": value, "a_step": counts[name] / 5}
        for name, value in times.most_common(_LISTED)
    ]
    loader.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path)
    parser.add_argument("side", type=int)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--variants", nargs="+", default=["loop", "graph", "explicit"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_intermixed_args()
    warnings.filterwarnings("ignore")
    results = {}
    for variant in options.variants:
        results[variant] = measure(options.images, variant, side=options.side, options=options)
        shown = {key: value for key, value in results[variant].items() if key != "kernels"}
        print(f"{options.side} px, {variant}: {json.dumps(shown)}", flush=True)
        for kernel in results[variant]["kernels"]:
            print(f"   {kernel['milliseconds']:.3f} ms x{kernel['a_step']:.0f} {kernel['name']}")
        # a later variant may be cut off
        if options.output:
            options.output.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
