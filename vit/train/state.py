"""A step's whole state as plain tensors: the same checkpoint whatever number of processes shares the work.

Tensors that FSDP2 shards are gathered one at a time, and cut again on loading. All processes have to take part.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vit.train.step import TrainStep


def collect_state(step: TrainStep) -> dict[str, Any]:
    """Weights, their average, optimizer, schedule and the step's own counters."""
    return {
        "model": gather(step.module.state_dict()),
        "average": gather(step.average.model.state_dict()) if step.average else None,
        "optimizer": gather(step.optimizer.state_dict()),
        "schedule": step.schedule.state_dict(),
        "step": step.state_dict(),
    }


def load_state(step: TrainStep, state: dict[str, Any]) -> None:
    """Put back what `collect_state` took, in place."""
    if (state["average"] is None) != (step.average is None):
        raise ValueError(
            "the checkpoint and this run differ in keeping an average of the weights; use one ema_decay"
        )
    _load_weights(step.module, state["model"])
    if step.average:
        _load_weights(step.average.model, state["average"])
    parameters = [parameter for group in step.optimizer.param_groups for parameter in group["params"]]
    moments = {
        index: {name: _cut_like(value, parameters[index]) for name, value in entries.items()}
        for index, entries in state["optimizer"]["state"].items()
    }
    step.optimizer.load_state_dict(state["optimizer"] | {"state": moments})
    step.schedule.load_state_dict(state["schedule"])
    step.load_state_dict(state["step"])


def gather(value: Any) -> Any:
    """`value`, a tensor or a nest of them, with sharded tensors made whole on the CPU."""
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if isinstance(value, dict):
        return {key: gather(item) for key, item in value.items()}
    return [gather(item) for item in value] if isinstance(value, list) else value


@torch.no_grad()
def _load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    own = model.state_dict()
    if own.keys() != weights.keys():
        raise ValueError(
            "the checkpoint is of another architecture; resume with the configuration it began with"
        )
    for name, tensor in own.items():
        tensor.copy_(_cut_like(weights[name].to(tensor.device), tensor))


def _cut_like(value: Any, pattern: Tensor) -> Any:
    """This process's shard of `value` where `pattern` is sharded."""
    if isinstance(pattern, DTensor) and isinstance(value, Tensor) and value.shape == pattern.shape:
        whole = value.to(pattern.device)
        return distribute_tensor(whole, pattern.device_mesh, pattern.placements, src_data_rank=None)
    return value
