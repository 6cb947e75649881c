"""A model sharded over several processes by FSDP2 (`train.parallel=fsdp`), and its state in files of which each process
writes its own.

torch.distributed.checkpoint writes the shards as safetensors files and reads them into any number of processes. All of
this takes 3 s to import, so it is imported where a model is sharded.
"""

import warnings
from itertools import pairwise
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import api, hf_storage, state_dict, state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from vit.model.logits import compute_logits
from vit.training.step import TrainStep


def shard_model(model: nn.Module, *, world_size: int, device: torch.device) -> nn.Module:
    """`model` with its weights divided among the processes: each block goes to the device and is sharded there before
    the next."""
    mesh = init_device_mesh(device.type, (world_size,))
    blocks = [fully_shard(block, mesh=mesh) for block in model.get_submodule("blocks").children()]
    for module, following in pairwise([fully_shard(model, mesh=mesh), *blocks]):
        module.set_modules_to_forward_prefetch([following])
    cast(Any, model).compute_logits = MethodType(compute_logits, model)
    register_fsdp_forward_method(model, "compute_logits")
    return model


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


def restore_shards(step: TrainStep, directory: Path, groups: list[dict[str, Any]]) -> None:
    """Put back, in place, what `save_shards` wrote into `directory`, with the optimizer's settings that it returned for
    each of its groups; all processes take part."""
    tensors, _ = _find_tensors(step)
    reader = hf_storage.HuggingFaceStorageReader(str(directory))
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        state_dict_loader.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    weights, optimizer = tensors["model"], {"state": tensors["optimizer"], "param_groups": groups}
    state_dict.set_state_dict(step.module, step.optimizer, model_state_dict=weights, optim_state_dict=optimizer)


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
