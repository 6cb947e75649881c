"""A step's whole state: one dictionary or, with `train.parallel=fsdp`, files of which each process writes its own.

torch.distributed.checkpoint writes the shards as safetensors files and reads them into any number of processes.
"""

import warnings
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import api, hf_storage, state_dict, state_dict_loader, state_dict_saver

from vit.training.step import TrainStep


def collect_state(step: TrainStep) -> dict[str, Any]:
    """Weights, their average, optimizer, schedule and the step's own counters."""
    return {
        "model": step.module.state_dict(),
        "average": step.average.state_dict() if step.average is not None else None,
        "optimizer": step.optimizer.state_dict(),
        "schedule": step.schedule.state_dict(),
        "step": step.state_dict(),
    }


def restore_state(step: TrainStep, state: dict[str, Any], shards: Path | None = None) -> None:
    """Put back, in place, what `collect_state` returned or, with the directory `shards`, what `save_shards` wrote there
    and returned; all processes take part."""
    for group in state["groups"] if shards else state["optimizer"]["param_groups"]:
        if "pieces" in group:  # the name in version 0.1
            group["num_matrices"] = group.pop("pieces")
    if shards:
        tensors, _ = _find_tensors(step)
        reader = hf_storage.HuggingFaceStorageReader(str(shards))
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            state_dict_loader.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
        weights, optimizer = tensors["model"], {"state": tensors["optimizer"], "param_groups": state["groups"]}
        state_dict.set_state_dict(step.module, step.optimizer, model_state_dict=weights, optim_state_dict=optimizer)
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


def save_shards(step: TrainStep, directory: Path) -> dict[str, Any]:
    """Write the tensors of weights, average and optimizer into `directory` and return the rest of the state; all
    processes take part. Raises OSError where one can't write."""
    tensors, groups = _find_tensors(step)
    writer = hf_storage.HuggingFaceStorageWriter(str(directory), save_distributed=True)
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # "is distributed disabled?"
            state_dict_saver.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
    except api.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"process {rank} could not write its part of the checkpoint: {cause}") from error
    return {"groups": groups, "schedule": step.schedule.state_dict(), "step": step.state_dict()}


def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights on the CPU, sharded ones made whole, in the main process; nothing in the others."""
    whole = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    return cast(dict[str, Tensor], state_dict.get_model_state_dict(model, options=whole))


def _find_tensors(step: TrainStep) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The tensors to write, or to read into, by name, and the optimizer's settings for each of its groups."""
    weights, found = state_dict.get_state_dict(step.module, step.optimizer)
    optimizer = cast(dict[str, Any], found)
    tensors = {"model": weights, "optimizer": optimizer["state"]}
    if step.average is not None:
        tensors["average"] = step.average.state_dict()  # loaded in place
    return tensors, optimizer["param_groups"]
