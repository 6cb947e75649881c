"""What a step will cost, measured on a few images before the run starts."""

import copy
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MEASURED_IMAGES = 128
_MEASURED_STEPS = 2


@dataclass(frozen=True)
class StepCost:
    """Of one training step."""

    seconds: float
    memory_bytes: int  # weights, gradients, optimizer state (two values a weight) and what backward keeps


def measure_step_cost(
    model: nn.Module,
    image_shape: tuple[int, int, int],
    *,
    batch_size: int,
    part_size: int,
    dtype: torch.dtype,
) -> StepCost:
    """Run forward and backward on blank images, a part's at most, and scale up to the batch.

    Leaves `model` and the random numbers as they were. The model is not compiled here, so the time is an upper
    estimate.
    """
    device = next(model.parameters()).device
    count = min(_MEASURED_IMAGES, part_size)
    with torch.random.fork_rng():
        trial = copy.deepcopy(model).train()
        images = torch.zeros(count, *image_shape, device=device)
        labels = torch.zeros(count, dtype=torch.int64, device=device)
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        def step() -> None:
            with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
                loss = F.cross_entropy(trial(images).float(), labels)
            loss.backward()  # type: ignore[no-untyped-call]

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            step()  # the first one also warms up
        times = []
        for _ in range(_MEASURED_STEPS):
            start = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    activations = max(sum(kept.values()) - weights, 0) * part_size // count
    return StepCost(min(times) * batch_size / count, 4 * weights + activations)
