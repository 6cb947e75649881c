"""One model in several processes: torch's DistributedDataParallel or FSDP2."""

from types import MethodType
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from vit.model.logits import compute_logits
from vit.runtime.processes import Process


def wrap_model(
    model: nn.Module, *, process: Process, parallel: Literal["ddp", "fsdp"], device: torch.device
) -> nn.Module:
    """`model` on `device` with its gradients averaged over the processes (ddp) or its weights sharded too (fsdp): each
    block goes to the device and is sharded there before the next."""
    if process.world_size == 1:
        return model.to(device)
    if parallel == "ddp":
        return DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)
    mesh = init_device_mesh(device.type, (process.world_size,))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    cast(Any, model).compute_logits = MethodType(compute_logits, model)
    register_fsdp_forward_method(model, "compute_logits")
    return model


class ShardedLogits(nn.Module):
    """`compute_logits` of a model that `wrap_model` sharded: FSDP2 gathers weights for `forward` and registered methods
    only. All processes call it together."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B classes"]:
        return cast(Tensor, cast(Any, self.model).compute_logits(images))
