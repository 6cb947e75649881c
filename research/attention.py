"""Time the ways to compute attention, on any device: what the default rule `choose_backend` rests
on.

    python research/attention.py --output benchmarks/results

Each variant starts from queries, keys and values as the encoder's layer hands them over (views of
one projection) and ends with the heads merged. Variants take turns round by round; a result is the
median over the rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from conditions import describe_conditions, write_result
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vit.model.attention import scaled_dot_product_attention
from vit.model.cpu_kernels import choose_backend

# batch, heads, tokens, head width
SHAPES = [
    (256, 3, 16, 64),
    (256, 3, 64, 64),
    (256, 4, 64, 32),
    (64, 6, 50, 64),
    (64, 6, 197, 64),
    (8, 6, 577, 64),
    (2, 6, 1370, 64),
]
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}

Variant = Callable[[Tensor, Tensor, Tensor], Tensor]


def explicit(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value)[0]


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value)


def build_variants(device: torch.device) -> dict[str, tuple[Variant, SDPBackend | None]]:
    """torch's own choice of kernel and the explicit products; on CUDA also each kernel by name."""
    variants: dict[str, tuple[Variant, SDPBackend | None]] = {
        "fused": (fused, None),
        "explicit": (explicit, None),
    }
    if device.type == "cuda":
        variants |= {f"fused:{name}": (fused, kernel) for name, kernel in KERNELS.items()}
    return variants


def time_once(
    variant: tuple[Variant, SDPBackend | None],
    projected: Tensor,
    gradient: Tensor,
    *,
    training: bool,
    clock: Callable[[], float],
) -> float:
    """Milliseconds of one pass over [B, N, 3, H, K], by a GPU's own clock where there is one."""
    function, kernel = variant
    cuda = projected.device.type == "cuda"
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if cuda else []
    if cuda:
        events[0].record()
    start = clock()
    with sdpa_kernel(kernel) if kernel else nullcontext(), torch.set_grad_enabled(training):
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
        merged = function(query, key, value).transpose(1, 2).flatten(2)
        if training:
            projected.grad = None
            merged.backward(gradient)
    if cuda:
        events[1].record()
        torch.cuda.synchronize()
        return events[0].elapsed_time(events[1])
    return 1e3 * (clock() - start)


def measure(
    shape: tuple[int, ...],
    *,
    device: torch.device,
    dtype: torch.dtype,
    training: bool,
    rounds: int,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Median milliseconds of every variant that runs, and what the default rule picks."""
    batch, heads, tokens, width = shape
    torch.manual_seed(0)
    projected = torch.randn(
        batch, tokens, 3, heads, width, device=device, dtype=dtype, requires_grad=training
    )
    gradient = torch.randn(batch, tokens, heads * width, device=device, dtype=dtype)
    times: dict[str, list[float]] = {}
    for name, variant in build_variants(device).items():
        try:
            for _ in range(2):  # kernels are chosen and compiled at the first call
                time_once(variant, projected, gradient, training=training, clock=clock)
            times[name] = []
        except RuntimeError:  # a kernel that this device or dtype does not have
            continue
    variants = build_variants(device)
    for _ in range(rounds):
        for name, values in times.items():
            values.append(
                time_once(variants[name], projected, gradient, training=training, clock=clock)
            )
    return {
        "shape": dict(zip(("batch", "heads", "tokens", "head_dim"), shape, strict=True)),
        "dtype": str(dtype).removeprefix("torch."),
        "mode": "training" if training else "inference",
        "milliseconds": {
            name: round(statistics.median(values), 3) for name, values in times.items()
        },
        "default": choose_backend(device.type, dtype, tokens, training),
    }


def render(results: list[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for result in results for name in result["milliseconds"]))
    table = Table(title="milliseconds; regret: default beside the faster")
    for column in ("mode", "dtype", "B×H×N×K", *names, "default", "regret"):
        table.add_column(
            column, justify="left" if column in ("mode", "dtype") else "right", no_wrap=True
        )
    for result in results:
        times = result["milliseconds"]
        regret = times[result["default"]] / min(times["fused"], times["explicit"]) - 1
        cells = [f"{times[name]:.1f}" if name in times else "–" for name in names]
        shape = "×".join(map(str, result["shape"].values()))
        table.add_row(
            result["mode"], result["dtype"], shape, *cells, result["default"], f"{regret:.0%}"
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--processor-time", action="store_true", help="for one thread on a busy machine"
    )
    parser.add_argument(
        "--output", type=Path, help="folder for attention-<device>.json and the table"
    )
    arguments = parser.parse_args()
    if arguments.processor_time and (arguments.threads != 1 or arguments.device != "cpu"):
        parser.error(
            "--processor-time adds up over threads and ignores a GPU; use --threads 1 --device cpu"
        )
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    clock = time.process_time if arguments.processor_time else time.perf_counter
    machine = describe_conditions(device)
    results = [
        measure(
            shape,
            device=device,
            dtype=dtype,
            training=training,
            rounds=arguments.rounds,
            clock=clock,
        )
        for training in (True, False)
        for dtype in (torch.bfloat16, torch.float32)
        for shape in SHAPES
    ]
    console = Console(width=120, record=True)
    console.print(*(f"{key}: {value}" for key, value in machine.items()), sep="\n", highlight=False)
    console.print(render(results))
    if arguments.output:
        path = write_result(arguments.output, "attention", {"machine": machine, "results": results})
        path.with_suffix(".txt").write_text(console.export_text())


if __name__ == "__main__":
    main()
