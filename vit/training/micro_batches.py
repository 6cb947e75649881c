"""The micro-batches that a batch is split into, so that it fits a CPU's caches or a GPU's
memory."""

import gc
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from vit.model.vision_transformer import VisionTransformer
from vit.runtime.device import Precision, autocast, count_free_bytes, free_cached_memory

# Bytes of a micro-batch's largest activation for each thread: a core's own cache and its part of
# the shared one.
_CACHE_BYTES = 3 * 2**20
_BYTES_PER_VALUE = 2  # bfloat16
# Fraction of a GPU's free memory that a step takes: compiled code and the allocator need some, too.
MEMORY_FRACTION = 0.8
# Images whose bytes are measured.
_MEASURED_IMAGES = 8


def choose_grad_accum_steps(
    model: nn.Module,
    *,
    batch_size: int,
    image_size: tuple[int, int],
    device: torch.device,
    precision: Precision,
) -> int:
    """Choose the number of micro-batches that a batch is split into.

    Our models on a CPU take micro-batches that stay in its caches: the widest activation, which is
    the MLP's hidden one, has at most 3 MiB a thread. Where memory bounds the time of a step this is
    1.1 × faster than the whole batch at once, with half its memory. Other models on a CPU take the
    batch at once, as all models do on a GPU of Apple. On another GPU the batch is split if it would
    take more than 0.8 of the free memory, according to the bytes that a few images take.

    Args:
        model: Model on its device. What else stays there, such as decoded images, is there already.
        batch_size: Images of a step in this process.
        image_size: (height, width).
        device: The model's device.
        precision: Precision of the forward pass.

    Raises:
        torch.OutOfMemoryError: One image doesn't fit.
    """
    if device.type == "cpu":
        if not isinstance(model, VisionTransformer):
            return 1
        patch_height, patch_width = model.patch_embed.patch_size
        tokens = (image_size[0] // patch_height) * (image_size[1] // patch_width)
        widths = [m.out_features for m in model.blocks[0].modules() if isinstance(m, nn.Linear)]
        image_bytes = _BYTES_PER_VALUE * tokens * max(widths)
        micro_batch_size = max(_CACHE_BYTES * torch.get_num_threads() // image_bytes, 1)
        return -(-batch_size // micro_batch_size)

    if device.type == "mps":
        # torch measures no peak there
        return 1

    # The allocated bytes are read once. An earlier pass frees its gradients a little after its end,
    # and memory that is freed while a pass is measured would be taken off the bytes of that pass.
    gc.collect()
    allocated_bytes = torch.get_device_module(device).memory_allocated(device)
    measure = partial(_measure_peak_bytes, model, image_size, device, precision)
    num_images = min(_MEASURED_IMAGES, batch_size)
    half = num_images // 2
    while True:
        try:
            half_bytes = measure(half) - allocated_bytes if half else 0
            peak_bytes = measure(num_images) - allocated_bytes
            break
        except torch.OutOfMemoryError:
            if num_images == 1:
                raise
        num_images = half
        half = num_images // 2
    free_cached_memory(device)

    image_bytes = max((peak_bytes - half_bytes) // (num_images - half), 1)
    # The gradients, and the state that the optimizer will keep for each weight, come on top.
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    constant_bytes = max(peak_bytes - num_images * image_bytes, 0) + 2 * weight_bytes
    available_bytes = MEMORY_FRACTION * count_free_bytes(device) - constant_bytes
    max_images = max(int(available_bytes // image_bytes), 1)
    return -(-batch_size // max_images)


def _measure_peak_bytes(
    model: nn.Module,
    image_size: tuple[int, int],
    device: torch.device,
    precision: Precision,
    num_images: int,
) -> int:
    """Measure the most bytes of a GPU's memory that are allocated while a forward and backward pass
    of blank images runs. It changes neither weights nor gradients."""
    backend = torch.get_device_module(device)
    free_cached_memory(device)
    backend.reset_peak_memory_stats(device)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Batch normalisation changes its averages in a forward pass.
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.train()

    images = torch.zeros(num_images, 3, *image_size, device=device)
    labels = torch.zeros(num_images, dtype=torch.int64, device=device)
    with autocast(device, precision):
        logits = model(images)
    loss = F.cross_entropy(logits.float(), labels)
    gradients = torch.autograd.grad(loss, trainable, allow_unused=True)
    peak_bytes = int(backend.max_memory_allocated(device))
    del gradients

    for buffer, value in buffers:
        buffer.copy_(value)
    return peak_bytes
