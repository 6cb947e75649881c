"""A step's whole state: one dictionary or, of a sharded model, also the files of `sharding.py`."""

from pathlib import Path
from typing import Any

from torch import Tensor

from vit.training.step import TrainStep


def collect_state(step: TrainStep, shards: Path | None = None) -> dict[str, Any]:
    """Weights, their average, optimizer, schedule and the step's own counters. With the directory `shards` all
    processes write the tensors there, and the rest is returned; raises OSError where one can't write."""
    if shards:
        from vit.training.sharding import save_shards  # takes seconds, which other runs don't need

        return save_shards(step, shards)
    return {
        "model": step.module.state_dict(),
        "average": step.average.state_dict() if step.average is not None else None,
        "optimizer": step.optimizer.state_dict(),
        "schedule": step.schedule.state_dict(),
        "step": step.state_dict(),
    }


def restore_state(step: TrainStep, state: dict[str, Any], shards: Path | None = None) -> None:
    """Put back, in place, what `collect_state` returned and, with the directory `shards`, wrote there; all processes
    take part."""
    for group in state["groups"] if shards else state["optimizer"]["param_groups"]:
        if "pieces" in group:  # the name in version 0.1
            group["num_matrices"] = group.pop("pieces")
    if shards:
        from vit.training.sharding import restore_shards

        restore_shards(step, shards, state["groups"])
    else:
        if (state["average"] is None) != (step.average is None):
            raise ValueError("this run and its checkpoint differ in keeping averaged weights; use the same ema_decay")
        if step.module.state_dict().keys() != state["model"].keys():
            raise ValueError("the checkpoint is of another architecture; resume with the configuration it began with")
        step.module.load_state_dict(state["model"])
        if step.average is not None:
            step.average.load_state_dict(state["average"])
        step.optimizer.load_state_dict(state["optimizer"])
        for parameter, values in step.optimizer.state.items():
            if any(isinstance(value, Tensor) and value.shape not in ((), parameter.shape) for value in values.values()):
                raise ValueError("the optimizer's state is of another model")
    step.schedule.load_state_dict(state["schedule"])
    step.load_state_dict(state["step"])
