"""The cost of a prediction: time, FLOPs and memory."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.model.logits import compute_logits
from vit.runtime.device import Precision, autocast
from vit.runtime.machine import measure_peak_memory

_WARM_UP = 3
# seconds for each of latency and throughput
_SECONDS = 2.0
_MIN_REPETITIONS = 5
_MAX_REPETITIONS = 200


@dataclass(frozen=True)
class Cost:
    """The cost of one model on one device.

    Attributes:
        parameters: Number of parameters.
        flops_per_image: Floating-point operations; a multiply-add counts as two.
        batch_size: Images in a forward pass.
        images_per_second: Speed at that batch size, with the images in memory.
        latency_p50_seconds: Median time for one image.
        latency_p95_seconds: 95th percentile of the time for one image.
        peak_memory_bytes: Largest memory use.
        peak_memory_of: "device": memory allocated there; "process": largest resident set so far.
        threads: CPU threads.
    """

    parameters: int
    flops_per_image: int
    batch_size: int
    images_per_second: float
    latency_p50_seconds: float
    latency_p95_seconds: float
    peak_memory_bytes: int
    peak_memory_of: str
    threads: int


@torch.inference_mode()
def measure_cost(
    model: nn.Module, images: Float[Tensor, "B 3 H W"], *, precision: Precision
) -> Cost:
    """Time forward passes and count their operations, in about five seconds.

    Args:
        model: The model, on its device.
        images: A normalised batch, on the same device.
        precision: "float32", "bfloat16" or "float16".
    """
    # imports Triton, which takes seconds
    from torch.utils.flop_counter import FlopCounterMode

    net: Any = model
    device = images.device
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    with autocast(device, precision):
        batch_seconds = _time_passes(model, images)
        image_seconds = _time_passes(model, images[:1])
        with FlopCounterMode(display=False) as counter:
            # with every token of every block, as FLOPs are usually quoted
            net.forward_head(net.forward_features(images[:1]))

    if on_cuda:
        peak_memory_bytes = torch.cuda.max_memory_allocated(device)
    else:
        peak_memory_bytes = measure_peak_memory()
    return Cost(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        flops_per_image=int(counter.get_total_flops()),
        batch_size=len(images),
        images_per_second=float(len(images) / np.median(batch_seconds)),
        latency_p50_seconds=float(np.quantile(image_seconds, 0.5)),
        latency_p95_seconds=float(np.quantile(image_seconds, 0.95)),
        peak_memory_bytes=peak_memory_bytes,
        peak_memory_of="device" if on_cuda else "process",
        threads=torch.get_num_threads(),
    )


def add_costs(costs: Sequence[Cost]) -> Cost:
    """Return the cost of models that all predict each image, one after another."""
    return Cost(
        parameters=sum(cost.parameters for cost in costs),
        flops_per_image=sum(cost.flops_per_image for cost in costs),
        batch_size=costs[0].batch_size,
        images_per_second=1 / sum(1 / cost.images_per_second for cost in costs),
        latency_p50_seconds=sum(cost.latency_p50_seconds for cost in costs),
        latency_p95_seconds=sum(cost.latency_p95_seconds for cost in costs),
        peak_memory_bytes=max(cost.peak_memory_bytes for cost in costs),
        peak_memory_of=costs[0].peak_memory_of,
        threads=costs[0].threads,
    )


def _time_passes(model: nn.Module, images: Tensor) -> list[float]:
    """Return the seconds of each forward pass, including the wait for the device."""
    seconds: list[float] = []
    for repetition in range(_WARM_UP + _MAX_REPETITIONS):
        start = time.perf_counter()
        # reading the logits waits for them
        compute_logits(model, images).cpu()
        if repetition >= _WARM_UP:
            seconds.append(time.perf_counter() - start)
        if len(seconds) >= _MIN_REPETITIONS and sum(seconds) > _SECONDS:
            break
    return seconds
