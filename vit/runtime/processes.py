"""The processes of one run, as torchrun starts them."""

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class Process:
    """This process's place in the run."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """The one process that writes files and messages."""
        return self.rank == 0

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether `flag` is set in any process."""
        if self.world_size == 1:
            return flag
        total = torch.tensor(int(flag), device=device)
        dist.all_reduce(total, dist.ReduceOp.MAX)
        return bool(total)

    def broadcast(self, value: T) -> T:
        """The main process's `value`, in every process."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.world_size > 1:
            dist.barrier()


def current_process() -> Process:
    """This process's place in torch's process group; the only one where there is no group."""
    grouped = dist.is_available() and dist.is_initialized()
    return Process(dist.get_rank(), dist.get_world_size()) if grouped else Process()


@contextmanager
def join_processes(device: str) -> Iterator[tuple[Process, str]]:
    """Join torchrun's process group (NCCL or gloo), where there is one; yields this process and its device."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield Process(), device
        return
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_gpu:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=datetime.timedelta(minutes=10))
    try:
        yield current_process(), device
    finally:
        dist.destroy_process_group()
