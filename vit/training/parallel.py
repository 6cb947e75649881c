"""One model in several processes: torch's DistributedDataParallel or FSDP2."""

import sys
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vit.runtime.processes import Process

_BUCKETS = 8  # of gradients, or more


def wrap_model(
    model: nn.Module, *, process: Process, parallel: Literal["ddp", "fsdp"], device: torch.device
) -> nn.Module:
    """`model` on `device` with its gradients averaged over the processes (ddp) or its weights sharded too (fsdp): each
    block goes to the device and is sharded there before the next. Both exchange while they compute: the gradients of
    the last layers during the backward pass of the first, a block's weights during the forward pass of the one before.
    """
    if process.world_size == 1:
        return model.to(device)
    if parallel == "ddp":
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        # torch's 25 MB would hold a small model whole, and its exchange would begin when the backward pass has ended
        bucket_mb = max(num_bytes / 2**20 / _BUCKETS, 1)
        size: dict[str, Any] = {"bucket_cap_mb": bucket_mb} if bucket_mb < 25 else {}
        return DistributedDataParallel(model.to(device), gradient_as_bucket_view=True, **size)
    from vit.training.sharding import shard_model  # takes seconds, which other runs don't need

    return shard_model(model, world_size=process.world_size, device=device)


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 shards the model. torch's part for it has been imported then, and is not imported to know."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


class ShardedLogits(nn.Module):
    """`compute_logits` of a model that `wrap_model` sharded: FSDP2 gathers weights for `forward` and registered methods
    only. All processes call it together."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B classes"]:
        return cast(Tensor, cast(Any, self.model).compute_logits(images))
