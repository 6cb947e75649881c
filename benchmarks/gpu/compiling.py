"""How long compiling takes and what it gains: the blocks alone, as `vit train` does on a GPU, the
whole step, and nothing; each in a process with an empty cache, then again with what that left.

    python benchmarks/gpu/compiling.py --output FILE
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from tests.recipe_step import build, draw_batch, list_sizes, load_recipe
from vit.runtime.device import choose_device
from vit.training.compiled_function import CompiledBlocks, CompiledFunction

RECIPE = "cifar10/speedrun"


def measure(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the first step and milliseconds of a later one, for each image size."""
    device = choose_device(options.device)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    config = load_recipe(RECIPE, *options.overrides)
    step = build(config, device=device)
    step.graphs = step.threads = None
    if mode == "whole":
        step._forward = CompiledFunction(step._compute_loss)
    elif mode == "blocks":
        step._forward = CompiledBlocks(step._compute_loss, step.module.blocks)
    sizes = {}
    for _, size in list_sizes(config):
        images, targets = (part.to(device) for part in draw_batch(config, size))
        start = time.perf_counter()
        step(images, targets)
        wait()
        first = time.perf_counter() - start
        for _ in range(3):
            step(images, targets)
        wait()
        start = time.perf_counter()
        for _ in range(options.steps):
            step(images, targets)
        wait()
        seconds = (time.perf_counter() - start) / options.steps
        sizes[f"{size[0]} px"] = {"first_seconds": first, "milliseconds": 1e3 * seconds}
    cache = {
        name: count for name, count in counters["aot_autograd"].items() if "autograd_cache" in name
    }
    return {"sizes": sizes, "graphs": counters["stats"]["unique_graphs"], "cache": cache}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--modes", nargs="+", default=["blocks", "whole", "none"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_intermixed_args()
    warnings.filterwarnings("ignore")
    if options.one:
        print(json.dumps(measure(options.one, options)))
        return
    results: dict[str, Any] = {}
    for mode in options.modes:
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm") if mode != "none" else ("uncompiled",):
                command = [
                    sys.executable, __file__, *options.overrides, "--one", mode,
                    "--device", options.device, "--steps", str(options.steps),
                ]  # fmt: skip
                done = subprocess.run(
                    command,
                    env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache},
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                results[f"{mode}, {state}"] = json.loads(done.stdout.splitlines()[-1])
                print(f"{mode}, {state}: {done.stdout.splitlines()[-1]}", flush=True)
                if options.output:
                    options.output.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
