"""What a step will cost, measured on a few images before the run starts, and how it is split for the caches."""

import copy
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit.model.vision_transformer import VisionTransformer
from vit.runtime.device import Precision, autocast
from vit.runtime.threads import BatchThreads

_MEASURED_IMAGES, _MEASURED_STEPS = 128, 2
# of a micro-batch's largest activation, for each thread: a core's own cache and its part of the shared one
_CACHE_BYTES = 3 * 2**20


@dataclass(frozen=True)
class StepCost:
    seconds: float
    memory_bytes: int  # weights, gradients, optimizer state (two values a weight) and what backward keeps


def measure_step_cost(
    model: nn.Module, *, batch_size: int, image_size: tuple[int, int], grad_accum_steps: int, precision: Precision
) -> StepCost:
    """Run forward and backward on blank images, one micro-batch's at most, and scale up to the batch. Leaves `model`
    and the random numbers as they were. The time is an upper estimate: the model is not compiled here."""
    device = next(model.parameters()).device
    micro_batch_size = -(-batch_size // grad_accum_steps)
    count = min(_MEASURED_IMAGES, micro_batch_size)
    with torch.random.fork_rng():
        trial = copy.deepcopy(model).train()
        images = torch.zeros(count, 3, *image_size, device=device)
        labels = torch.zeros(count, dtype=torch.int64, device=device)
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        def step() -> float:
            start = time.perf_counter()
            with autocast(device, precision):
                loss = F.cross_entropy(trial(images).float(), labels)
            torch.autograd.backward(loss)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter() - start

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            step()  # the first one also warms up
        seconds = min(step() for _ in range(_MEASURED_STEPS))
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    activations = max(sum(kept.values()) - weights, 0) * micro_batch_size // count
    return StepCost(seconds * batch_size / count, 4 * weights + activations)


def choose_grad_accum_steps(
    model: nn.Module, *, batch_size: int, image_size: tuple[int, int], device: torch.device
) -> int:
    """Into how many micro-batches a batch is split: of our models on a CPU so that each stays in its caches, else 1. A
    micro-batch's widest activation, the MLP's hidden one, takes at most 3 MiB a thread in two bytes a value. Where
    memory bounds a step's time this is 1.1 × faster than the whole batch at once, with half its memory."""
    if device.type != "cpu" or not isinstance(model, VisionTransformer):
        return 1
    patch, block = model.patch_embed.patch_size, model.blocks[0]
    tokens = (image_size[0] // patch[0]) * (image_size[1] // patch[1])
    width = max(layer.out_features for layer in block.modules() if isinstance(layer, nn.Linear))
    size = max(_CACHE_BYTES * torch.get_num_threads() // (2 * tokens * width), 1)
    return int(-(-batch_size // size))


def choose_threads(model: nn.Module, *, device: torch.device) -> BatchThreads | None:
    """Threads for the micro-batches of our models on a CPU with several cores. Not where something draws random numbers
    that only torch's own generator gives, or looks at the whole batch, as other models may."""
    random = any(isinstance(module, nn.Dropout) and module.p for module in model.modules())
    if device.type != "cpu" or not isinstance(model, VisionTransformer) or random or torch.get_num_threads() == 1:
        return None
    return BatchThreads()
