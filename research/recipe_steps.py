"""Training steps of the packaged recipes on their own: images a second, share of the device's
matmul rate, memory.

    python research/recipe_steps.py cifar10/speedrun cifar10/best --device cuda --output benchmarks/results

Batches are random and lie on the device, so that nothing but the step is timed. The variants are

    plain      the step as it is
    compiled   forward, loss and backward compiled, as train.compile=true does
    graph      the same, and the whole step, its update too, captured in one CUDA graph (CUDA only)

The device's rates are measured beside them: a product of two large matrices, a copy, and the time
the host takes to start a kernel. These are the three that `step_cost.py` takes from data sheets or
assumes.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conditions import describe_conditions, write_result
from recipe_step import build, draw_batch, load_recipe
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vit.analysis.faithfulness.map_metrics import to_markdown
from vit.runtime.device import choose_device, choose_precision
from vit.training.step_graphs import StepGraph
from vit.training.train_step import TrainStep

NAME = "recipe-steps"
SIDE = 8192  # of the large matrices
SMALL = ["model.depth=2", "model.embed_dim=64", "model.num_heads=1", "train.batch_size=32"]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_repeated(work: Callable[[], Any], device: torch.device, *, repeats: int) -> float:
    """Median seconds of a call, to its end on the device; the first two are left out."""
    seconds = []
    for _ in range(repeats + 2):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def measure_device(device: torch.device, *, side: int = SIDE) -> dict[str, float]:
    """TFLOP/s of a large bfloat16 product, GB/s of a copy (read and written), microseconds to start
    a kernel."""
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = time_repeated(lambda: left @ right, device, repeats=10)
    source = torch.randn(4 * side * side, device=device)
    target = torch.empty_like(source)
    copy = time_repeated(lambda: target.copy_(source), device, repeats=10)
    small = torch.zeros(8, device=device)
    launches = 2000

    def launch() -> None:
        for _ in range(launches):
            small.add_(1)

    seconds = time_repeated(launch, device, repeats=3)
    return {
        "matmul_tflops": 2 * side**3 / product / 1e12,
        "copy_gb_per_second": 2 * source.nbytes / copy / 1e9,
        "launch_microseconds": 1e6 * seconds / launches,
    }


def capture(step: TrainStep, images: Tensor, targets: Tensor) -> Callable[[Tensor, Tensor], Any]:
    """A step that replays one CUDA graph."""
    graph = StepGraph(step.run_on_device, step.optimizer, images, targets)

    def replay(images: Tensor, targets: Tensor) -> Any:
        step.set_schedule_values()
        result = graph.replay(images, targets)
        step.num_steps += 1
        return result

    return replay


def measure_variant(
    name: str, variant: str, device: torch.device, *, seconds: float, overrides: list[str]
) -> Any:
    """Images a second over about `seconds` of steps, waiting only at the end."""
    if variant == "graph" and device.type != "cuda":
        raise RuntimeError("a CUDA graph needs CUDA")
    config = load_recipe(name, f"train.precision={choose_precision('auto', device)}", *overrides)
    torch.manual_seed(0)
    step = build(config, device=device, compile=variant != "plain")
    # each variant in its own way
    step.graphs = None
    images, targets = (
        values.to(device) for values in draw_batch(config, step.module.patch_embed.img_size)
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    for _ in range(3):  # allocates, compiles
        step(images, targets)
    run = capture(step, images, targets) if variant == "graph" else step
    run(images, targets)
    wait(device)
    first = time.perf_counter() - start
    count, losses, start = 0, [], time.perf_counter()
    while time.perf_counter() - start < seconds or count < 3:
        losses.append(run(images, targets).loss.clone())
        count += 1
        if count % 20 == 0:  # or the host runs far ahead
            wait(device)
    wait(device)
    elapsed = time.perf_counter() - start
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        step.module(images[:1])
    rate = count * len(images) / elapsed
    found = {
        "images_per_second": rate,
        "step_milliseconds": 1e3 * elapsed / count,
        "tflops": 3 * counter.get_total_flops() * rate / 1e12,
        "start_seconds": first,
        "losses": [float(losses[0]), float(losses[-1])],
    }
    if device.type == "cuda":
        found["peak_memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return found


def build_tables(result: dict[str, Any]) -> str:
    """One row a recipe and variant, with its share of the device's rate."""
    rates = result["device_rates"]
    rows = []
    for name, variants in result["recipes"].items():
        for variant, found in variants.items():
            if "error" in found:
                rows.append([f"`{name}`", variant, found["error"], "", "", "", ""])
                continue
            share = found["tflops"] / rates["matmul_tflops"]
            cells = [f"{found[key]:,.1f}" for key in ("images_per_second", "step_milliseconds")]
            memory = f"{found['peak_memory_gib']:.1f}" if "peak_memory_gib" in found else "–"
            rows.append(
                [
                    f"`{name}`",
                    variant,
                    *cells,
                    f"{share:.0%}",
                    memory,
                    f"{found['start_seconds']:.1f}",
                ]
            )
    header = ["recipe", "step", "images/s", "ms", "of the matmul rate", "GiB", "first 4 steps, s"]
    measured = (
        f"{result['machine']['device']}: {rates['matmul_tflops']:.1f} TFLOP/s in bfloat16, "
        f"{rates['copy_gb_per_second']:,.0f} GB/s, {rates['launch_microseconds']:.1f} µs a launch."
    )
    return f"{measured}\n\n{to_markdown(header, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=5.0, help="of steps for each variant")
    parser.add_argument("--variants", nargs="+", default=["plain", "compiled", "graph"])
    parser.add_argument(
        "--small", action="store_true", help="tiny models and matrices: a rehearsal"
    )
    parser.add_argument("--output", type=Path, help=f"folder for {NAME}-<machine>.json")
    options = parser.parse_args()
    device = choose_device(options.device)
    result: dict[str, Any] = {
        "machine": describe_conditions(device),
        "device_rates": measure_device(device, side=256 if options.small else SIDE),
        "recipes": {},
    }
    for name in options.recipes:
        variants: dict[str, Any] = {}
        result["recipes"][name] = variants
        for variant in options.variants:
            overrides = SMALL if options.small else []
            try:
                variants[variant] = measure_variant(
                    name, variant, device, seconds=options.seconds, overrides=overrides
                )
            except RuntimeError as error:  # one that fails doesn't take the others with it
                variants[variant] = {"error": str(error).splitlines()[0]}
            print(f"{name}, {variant}: {variants[variant]}", flush=True)
            # after every variant: the next one may be cut off
            if options.output:
                write_result(options.output, NAME, result)
    print(build_tables(result))


if __name__ == "__main__":
    main()
