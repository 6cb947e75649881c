"""How a training step is executed on its device: in which parts, on which threads, compiled or not;
and how long one takes."""

import os
import shutil
import time

import torch
from torch import nn

from vit.model.vision_transformer import VisionTransformer
from vit.runtime.processes import Process
from vit.runtime.threads import BatchThreads
from vit.training.plan import TrainingPlan
from vit.training.train_step import TrainStep

# of a micro-batch's largest activation, for each thread: a core's own cache and its part of the
# shared one
_CACHE_BYTES = 3 * 2**20
_BYTES_PER_VALUE = 2  # of bfloat16

# FLOPs at one image size from which compiling for that size pays. CPU: the step gains 8 to 13 % and
# compiling takes 32 s (2-core Zen 5), even after 6 minutes at 0.45 TFLOP/s; the next run finds it
# compiled. CUDA: assumed, 30 % and 60 s at 80 TFLOP/s.
_WORTHWHILE_FLOPS = {"cpu": 1.6e14, "cuda": 1.6e16}

_TIMED_STEPS = 3


def choose_grad_accum_steps(
    model: nn.Module, *, batch_size: int, image_size: tuple[int, int], device: torch.device
) -> int:
    """Into how many micro-batches a batch is split.

    Our models on a CPU take micro-batches that stay in its caches: the widest activation, the MLP's
    hidden one, has at most 3 MiB a thread. Where memory bounds a step's time this is 1.1 × faster
    than the whole batch at once, with half its memory. All others take the batch at once.

    Args:
        batch_size: images of a step, in this process.
        image_size: (height, width).
    """
    if device.type != "cpu" or not isinstance(model, VisionTransformer):
        return 1
    patch_height, patch_width = model.patch_embed.patch_size
    tokens = (image_size[0] // patch_height) * (image_size[1] // patch_width)
    widths = [m.out_features for m in model.blocks[0].modules() if isinstance(m, nn.Linear)]
    image_bytes = _BYTES_PER_VALUE * tokens * max(widths)
    micro_batch_size = max(_CACHE_BYTES * torch.get_num_threads() // image_bytes, 1)
    return -(-batch_size // micro_batch_size)


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


def estimate_seconds(
    train_step: TrainStep, plan: TrainingPlan, *, image_size: tuple[int, int], process: Process
) -> float:
    """Seconds that the steps of a run take, from a few of them on blank images. They train:
    `train_step` is of no use afterwards.

    Args:
        train_step: of the run; called in all processes.
        plan: of the run.
        image_size: (height, width) of its data.
        process: this process's place in the run.
    """
    batch_size = plan.batch_size // process.world_size
    images = torch.zeros(batch_size, 3, *image_size, device=train_step.device)
    labels = torch.zeros(batch_size, dtype=torch.int64, device=train_step.device)
    seconds = []
    for _ in range(1 + _TIMED_STEPS):
        start = time.perf_counter()
        float(train_step(images, labels).loss)  # reading it waits for the device
        seconds.append(time.perf_counter() - start)

    # the first one also warms up
    step_seconds = min(seconds[1:])
    # large images and all patches cost more than the small ones that a run may begin with
    return step_seconds * plan.count_full_steps(image_size)
