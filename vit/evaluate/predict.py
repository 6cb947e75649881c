"""From uint8 images to logits, as fast as the model goes."""

from collections.abc import Callable
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from vit.data.images import Preprocess

ReadBatch = Callable[[int, int], NDArray[np.uint8]]
Precision = Literal["float32", "bfloat16", "float16"]


@torch.inference_mode()
def predict_logits(
    model: nn.Module,
    read_batch: ReadBatch,
    *,
    count: int,
    preprocess: Preprocess,
    num_classes: int,
    batch_size: int,
    device: torch.device,
    precision: Precision,
    on_progress: Callable[[int], None] | None = None,
) -> NDArray[np.float32]:
    """Logits [count, num_classes] of the images that `read_batch(start, stop)` gives as uint8 [B, H, W, 3].

    In a process group every process takes every world_size-th batch and gets all logits back. Batches are cut
    the same way whatever the number of processes, so the logits are the same to the last bit; none is padded,
    so no image counts twice. `on_progress` hears how many images of this process are done.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    logits = torch.zeros(count, num_classes, device=device if world_size > 1 else "cpu")
    starts = range(rank * batch_size, count, world_size * batch_size)
    # one context around the loop: autocast keeps its bf16 copies of the weights until it is left
    with torch.autocast(device.type, getattr(torch, precision), enabled=precision != "float32"):
        for start in starts:
            stop = min(start + batch_size, count)
            images = torch.from_numpy(np.array(read_batch(start, stop)))
            images = preprocess.normalize(images.to(device, non_blocking=True))
            logits[start:stop] = compute_logits(model, images).to(logits.device)
            if on_progress is not None:
                on_progress(stop - start)
    if world_size > 1:
        dist.all_reduce(logits)  # every row is zero but on one process: a sum that rounds nothing
    return logits.cpu().numpy()


def compute_logits(model: nn.Module, images: Tensor) -> Tensor:
    """Logits in float32 under whatever autocast is on.

    The head runs in float32: logits rounded to bfloat16 tie, and ties move top-1 by tenths of a percent.
    """
    features = cast(Any, model).forward_features(images)  # timm's names: its models have them too
    with torch.autocast(images.device.type, enabled=False):
        logits: Tensor = cast(Any, model).forward_head(features.float())
    return logits
