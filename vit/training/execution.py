"""How a training step is executed on its device: in which parts, on which threads, compiled or not;
and how long one takes."""

import os
import shutil
import time
from collections.abc import Iterator
from functools import partial
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import nn

from vit.data.loader import Batch, TrainLoader
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.device import Precision, autocast, count_free_bytes, free_cached_memory
from vit.runtime.threads import BatchThreads
from vit.training.train_step import TrainStep

# of a micro-batch's largest activation, for each thread: a core's own cache and its part of the
# shared one
_CACHE_BYTES = 3 * 2**20
_BYTES_PER_VALUE = 2  # of bfloat16
# of a GPU's free memory, that a step takes: compiled code and the allocator need some, too
MEMORY_FRACTION = 0.8
# for the bytes of one
_MEASURED_IMAGES = 8

# FLOPs at one image size from which compiling for that size pays. CPU: the step gains 8 to 13 % and
# compiling takes 32 s (2-core Zen 5), even after 6 minutes at 0.45 TFLOP/s; the next run finds it
# compiled. CUDA: assumed, 30 % and 60 s at 80 TFLOP/s.
_WORTHWHILE_FLOPS = {"cpu": 1.6e14, "cuda": 1.6e16}

_TIMED_STEPS = 3
_LONG_STEP_SECONDS = 2.0


def choose_grad_accum_steps(
    model: nn.Module,
    *,
    batch_size: int,
    image_size: tuple[int, int],
    device: torch.device,
    precision: Precision,
) -> int:
    """Into how many micro-batches a batch is split.

    Our models on a CPU take micro-batches that stay in its caches: the widest activation, the MLP's
    hidden one, has at most 3 MiB a thread. Where memory bounds a step's time this is 1.1 × faster
    than the whole batch at once, with half its memory. Other models there take the batch at once.
    On a GPU the batch is split where it would take more than 0.8 of the free memory, from the bytes
    that a few images were measured to take.

    Args:
        model: on its device, with what else stays there, such as resident images.
        batch_size: images of a step, in this process.
        image_size: (height, width).
        device: the model's.
        precision: of the forward pass.

    Raises:
        torch.OutOfMemoryError: one image doesn't fit.
    """
    if device.type != "cpu":
        return _fit_memory(model, batch_size, image_size, device, precision)
    if not isinstance(model, VisionTransformer):
        return 1
    patch_height, patch_width = model.patch_embed.patch_size
    tokens = (image_size[0] // patch_height) * (image_size[1] // patch_width)
    widths = [m.out_features for m in model.blocks[0].modules() if isinstance(m, nn.Linear)]
    image_bytes = _BYTES_PER_VALUE * tokens * max(widths)
    micro_batch_size = max(_CACHE_BYTES * torch.get_num_threads() // image_bytes, 1)
    return -(-batch_size // micro_batch_size)


def _fit_memory(
    model: nn.Module,
    batch_size: int,
    image_size: tuple[int, int],
    device: torch.device,
    precision: Precision,
) -> int:
    """The micro-batches of `choose_grad_accum_steps` on a GPU."""
    measure = partial(_measure_peak_bytes, model, image_size, device, precision)
    num_images = min(_MEASURED_IMAGES, batch_size)
    half = num_images // 2
    while True:
        try:
            half_bytes = measure(half) if half else 0
            peak_bytes = measure(num_images)
            break
        except torch.OutOfMemoryError:
            if num_images == 1:
                raise
        num_images = half
        half = num_images // 2
    free_cached_memory(device)

    image_bytes = max((peak_bytes - half_bytes) // (num_images - half), 1)
    # gradients, and what the optimizer is yet to keep of each weight
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
    """Bytes of a GPU's memory that a forward and backward pass of blank images takes for as long as
    it lasts. It changes neither weights nor gradients."""
    backend = torch.get_device_module(device)
    free_cached_memory(device)
    backend.reset_peak_memory_stats(device)
    before = backend.memory_allocated(device)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # a batch normalisation's averages
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.train()

    images = torch.zeros(num_images, 3, *image_size, device=device)
    labels = torch.zeros(num_images, dtype=torch.int64, device=device)
    with autocast(device, precision):
        logits = model(images)
    loss = F.cross_entropy(logits.float(), labels)
    gradients = torch.autograd.grad(loss, trainable, allow_unused=True)
    peak_bytes = backend.max_memory_allocated(device)
    del gradients

    for buffer, value in buffers:
        buffer.copy_(value)
    return int(peak_bytes - before)


def choose_threads(model: nn.Module, *, device: torch.device) -> BatchThreads | None:
    """Threads that divide a batch, for our models on a CPU with several cores; None elsewhere."""
    # models of others may look at the whole batch
    is_ours = isinstance(model, VisionTransformer)
    if device.type != "cpu" or torch.get_num_threads() == 1 or not is_ours:
        return None
    # dropout takes its random numbers from torch's own generator, in no certain order of threads
    if any(isinstance(module, nn.Dropout) and module.p for module in model.modules()):
        return None
    return BatchThreads()


def should_compile(device_type: str, *, total_flops: float, num_sizes: int = 1) -> bool:
    """Whether compiling the training step pays. It depends on nothing that is measured, so that a
    resumed run decides as the interrupted one did.

    Args:
        total_flops: of the run, forward and backward.
        num_sizes: image sizes of the run, each of which is compiled for.
    """
    pays = total_flops / num_sizes >= _WORTHWHILE_FLOPS.get(device_type, float("inf"))
    compilers = (os.environ.get("CXX", "c++"), "g++", "clang++")
    return pays and any(shutil.which(compiler) for compiler in compilers)


def time_blank_steps(
    train_step: TrainStep, *, batch_size: int, image_size: tuple[int, int]
) -> float:
    """Seconds of a step, from a few of them on blank images. They train."""
    images = torch.zeros(batch_size, 3, *image_size, device=train_step.device)
    labels = torch.zeros(batch_size, dtype=torch.int64, device=train_step.device)
    return _time_steps(train_step, repeat(Batch(images, labels, labels, labels)))


def time_steps(train_step: TrainStep, loader: TrainLoader) -> float:
    """Seconds of a step with the making of its batch, from a few of the first ones. They train, and
    the loader is closed."""

    def list_batches() -> Iterator[Batch]:
        # an epoch may be shorter than what is timed
        for epoch in range(1 + _TIMED_STEPS):
            yield from loader.epoch(epoch)

    try:
        return _time_steps(train_step, list_batches())
    finally:
        loader.close()


def _time_steps(train_step: TrainStep, batches: Iterator[Batch]) -> float:
    seconds: list[float] = []
    while len(seconds) < 1 + _TIMED_STEPS:
        start = time.perf_counter()
        batch = next(batches)
        float(train_step(batch.images, batch.targets).loss)  # reading it waits for the device
        seconds.append(time.perf_counter() - start)
        # a long one varies little, and its time is the user's
        if len(seconds) == 2 and seconds[-1] > _LONG_STEP_SECONDS:
            break
    # the first one also warms up
    return min(seconds[1:])
