"""Where the time of a training step goes on a CPU.

    python research/step_profile.py --output benchmarks/results

Each recipe's step (forward, backward, update) on random images, as `vit train` takes it: torch's
profiler sums the time that each kind of operation takes in all threads, and what it doesn't name is
Python, autograd and waiting.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import argparse
import time
from pathlib import Path
from typing import Any

from conditions import describe_conditions, write_result
from contention import build
from study_tables import build_step_profile_table
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from vit.runtime.memory import keep_freed_memory

NAME = "step-profile"
RECIPES = ("cifar10/cpu", "imagenette/cpu", "digits")
# kind → operations, by how their names begin
KINDS = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "convolution", "mkldnn", "_scaled_dot"),
    "activation": ("gelu", "relu", "silu", "threshold", "square", "pow", "sigmoid"),
    "normalisation": ("native_layer_norm", "native_batch_norm", "rms_norm", "linalg_vector_norm"),
    "softmax, loss": ("_softmax", "softmax", "log_softmax", "_log_softmax", "nll", "argmax"),
    "copies and casts": (
        "copy_",
        "_to_copy",
        "cat",
        "clone",
        "contiguous",
        "fill_",
        "zero_",
        "empty",
    ),
    "sums and products of elements": (
        "add",
        "sub",
        "mul",
        "div",
        "sum",
        "mean",
        "lerp",
        "where",
        "_foreach",
        "_fused",
    ),
}
STEPS = 5


def name_kind(operation: str) -> str | None:
    """The kind of "aten::NAME"; None for what torch's profiler lists beside operations."""
    if not operation.startswith(("aten::", "mkldnn::")):
        return None
    name = operation.split("::")[1]
    for kind, beginnings in KINDS.items():
        if name.startswith(beginnings):
            return kind
    return "other operations"


def measure_recipe(recipe: str) -> dict[str, Any]:
    """Milliseconds of a step by kind, summed over threads, and the step's own."""
    step, *batch = build(recipe)
    for _ in range(3):
        step(*batch)
    start = time.perf_counter()
    for _ in range(STEPS):
        step(*batch)
    wall = (time.perf_counter() - start) / STEPS
    everything = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everything) as found:
        for _ in range(STEPS):
            step(*batch)
    kinds = dict.fromkeys([*KINDS, "other operations"], 0.0)
    for event in found.key_averages():
        if (kind := name_kind(event.key)) is not None:
            kinds[kind] += event.self_cpu_time_total / 1e3 / STEPS
    threads = step.threads.count if step.threads else 1
    kinds["Python, autograd and waiting"] = max(1e3 * wall * threads - sum(kinds.values()), 0.0)
    return {
        "milliseconds": {kind: round(value, 1) for kind, value in kinds.items()},
        "step": round(1e3 * wall, 1),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help=f"folder for {NAME}-<machine>.json")
    arguments = parser.parse_args()
    machine = describe_conditions("cpu")
    keep_freed_memory()
    result = {"machine": machine, "recipes": {recipe: measure_recipe(recipe) for recipe in RECIPES}}
    print(build_step_profile_table(result))
    if arguments.output:
        print(write_result(arguments.output, NAME, result))


if __name__ == "__main__":
    main()
