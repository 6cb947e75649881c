"""A step's whole state as plain tensors, the same whatever number of processes shares it."""

from typing import Any

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from vit.train.step import TrainStep


def collect_state(step: TrainStep) -> dict[str, Any]:
    """Weights, optimizer, schedule and the step's own; sharded parts are gathered on the main process."""
    if _is_sharded(step):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model = get_model_state_dict(step.module, options=options)
        optimizer = get_optimizer_state_dict(step.module, step.optimizer, options=options)
    else:
        model, optimizer = step.module.state_dict(), step.optimizer.state_dict()
    return {"model": model, "optimizer": optimizer, "schedule": step.schedule.state_dict(), "step": step.state_dict()}


def load_state(step: TrainStep, state: dict[str, Any]) -> None:
    """Put back what `collect_state` took, in place."""
    if _is_sharded(step):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(step.module, state["model"], options=options)
        set_optimizer_state_dict(step.module, step.optimizer, state["optimizer"], options=options)
    else:
        step.module.load_state_dict(state["model"])
        step.optimizer.load_state_dict(state["optimizer"])
    step.schedule.load_state_dict(state["schedule"])
    step.load_state_dict(state["step"])


def _is_sharded(step: TrainStep) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in step.module.parameters())

