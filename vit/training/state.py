"""A step's whole state: one dictionary or, with `train.parallel=fsdp`, files of which each process writes its own.

torch.distributed.checkpoint writes the shards as safetensors files and reads them into any number of processes.
"""

import warnings
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from vit.training.step import TrainStep


def collect_state(step: TrainStep) -> dict[str, Any]:
    """Weights, their average, optimizer, schedule and the step's own counters."""
    return {
        "model": step.module.state_dict(),
        "average": step.average.model.state_dict() if step.average else None,
        "optimizer": step.optimizer.state_dict(),
        **_counters(step),
    }


def restore_state(step: TrainStep, state: dict[str, Any]) -> None:
    """Put back what `collect_state` took, in place."""
    if (state["average"] is None) != (step.average is None):
        raise ValueError(
            "the checkpoint and this run differ in keeping an average of the weights; use the same ema_decay"
        )
    if step.module.state_dict().keys() != state["model"].keys():
        raise ValueError("the checkpoint is of another architecture; resume with the configuration it began with")
    step.module.load_state_dict(state["model"])
    if step.average:
        step.average.model.load_state_dict(state["average"])
    _rename_old_keys(state["optimizer"]["param_groups"])
    step.optimizer.load_state_dict(state["optimizer"])
    _load_counters(step, state)


def save_shards(step: TrainStep, directory: Path) -> dict[str, Any]:
    """Write the tensors of weights, average and optimizer into `directory`; all processes take part.

    Returns the rest of the state. Raises OSError where a process can't write.
    """
    tensors, groups = _find_tensors(step)
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # "is distributed disabled?"
            save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"process {rank} could not write its part of the checkpoint: {cause}") from error
    return {"groups": groups, **_counters(step)}


def load_shards(step: TrainStep, directory: Path, state: dict[str, Any]) -> None:
    """Put back what `save_shards` wrote and returned; all processes take part."""
    tensors, _ = _find_tensors(step)
    _rename_old_keys(state["groups"])
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        load(tensors, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=not dist.is_initialized())
    set_state_dict(
        step.module,
        step.optimizer,
        model_state_dict=tensors["model"],
        optim_state_dict={"state": tensors["optimizer"], "param_groups": state["groups"]},
    )
    _load_counters(step, state)


def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights on the CPU, sharded ones made whole, in the main process; nothing in the others."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return cast(dict[str, Tensor], get_model_state_dict(model, options=whole))


def _find_tensors(step: TrainStep) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The tensors to write, or to read into, by name, and the optimizer's settings for each of its groups."""
    weights, found = get_state_dict(step.module, step.optimizer)
    optimizer = cast(dict[str, Any], found)
    tensors = {"model": weights, "optimizer": optimizer["state"]}
    if step.average:
        tensors["average"] = step.average.model.state_dict()  # loaded in place
    return tensors, optimizer["param_groups"]


def _rename_old_keys(groups: list[dict[str, Any]]) -> None:
    """Bring an optimizer's groups, as version 0.1 saved them, to the present names."""
    for group in groups:
        if "pieces" in group:
            group["num_matrices"] = group.pop("pieces")


def _counters(step: TrainStep) -> dict[str, Any]:
    return {"schedule": step.schedule.state_dict(), "step": step.state_dict()}


def _load_counters(step: TrainStep, state: dict[str, Any]) -> None:
    step.schedule.load_state_dict(state["schedule"])
    step.load_state_dict(state["step"])
