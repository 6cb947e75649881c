"""One model in several processes: torch's DistributedDataParallel."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vit.runtime.processes import Process

# Buckets of gradients; each is exchanged as soon as it is full. The largest size is torch's own.
_MIN_BUCKETS = 8
_MAX_BUCKET_MB = 25.0


def wrap_model(model: nn.Module, *, process: Process, device: torch.device) -> nn.Module:
    """Move a model to its device and, in a run of several processes, average its gradients over
    them. The gradients of the last layers are exchanged during the backward pass of the first.

    Args:
        model: The model, the same in all processes.
        process: This process's place in the run.
        device: Device of this process.
    """
    model.to(device)
    if process.world_size == 1:
        return model

    num_bytes = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
    # One bucket of torch's size would hold a small model whole, and its exchange would begin only
    # when the backward pass has ended.
    bucket_mb = min(max(num_bytes / 2**20 / _MIN_BUCKETS, 1.0), _MAX_BUCKET_MB)
    return DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
