"""What a prediction costs: FLOPs, throughput, latency and memory."""

import resource
import sys
import time
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.model.logits import compute_logits
from vit.runtime.device import Precision, autocast

_WARM_UP = 3
_SECONDS = 2.0  # spent on each of latency and throughput
_FEWEST, _MOST = 5, 200  # repetitions


@dataclass(frozen=True)
class Cost:
    """The cost of one model on one device."""

    parameters: int
    flops_per_image: int  # a multiply-add counts as two
    batch_size: int
    images_per_second: float  # forward passes at that batch size, the images already in memory
    latency_p50_seconds: float  # of one image
    latency_p95_seconds: float
    peak_memory_bytes: int
    peak_memory_of: str  # "device": allocated there; "process": its largest resident set so far
    threads: int  # of the CPU


@torch.inference_mode()
def measure_cost(model: nn.Module, images: Float[Tensor, "B 3 H W"], *, precision: Precision) -> Cost:
    """Time and count forward passes of `images`, a batch on the model's device. Takes about five seconds."""
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton, which other commands don't need

    device, on_cuda = images.device, images.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    with autocast(device, precision):
        batches, singles = _time_passes(model, images), _time_passes(model, images[:1])
        with FlopCounterMode(display=False) as counter:
            # every token of every block, which is how FLOPs are quoted
            cast(Any, model).forward_head(cast(Any, model).forward_features(images[:1]))
    # kilobytes, but on macOS
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Cost(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        flops_per_image=int(counter.get_total_flops()),
        batch_size=len(images),
        images_per_second=float(len(images) / np.median(batches)),
        latency_p50_seconds=float(np.quantile(singles, 0.5)),
        latency_p95_seconds=float(np.quantile(singles, 0.95)),
        peak_memory_bytes=torch.cuda.max_memory_allocated(device) if on_cuda else resident,
        peak_memory_of="device" if on_cuda else "process",
        threads=torch.get_num_threads(),
    )


def _time_passes(model: nn.Module, images: Tensor) -> list[float]:
    """Seconds of each forward pass, to the last one done on the device."""
    seconds: list[float] = []
    for repetition in range(_WARM_UP + _MOST):
        start = time.perf_counter()
        compute_logits(model, images).cpu()  # reading the logits waits for them
        if repetition >= _WARM_UP:
            seconds.append(time.perf_counter() - start)
        if len(seconds) >= _FEWEST and sum(seconds) > _SECONDS:
            break
    return seconds
