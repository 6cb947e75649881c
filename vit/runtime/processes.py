"""Processes of one run that torchrun starts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from vit.runtime.arguments import first_line
from vit.runtime.device import choose_device

T = TypeVar("T")

# Time limit until the first step: one machine may still decode images that another one has decoded.
_START_TIMEOUT = timedelta(hours=1)


class ProcessLostError(ConnectionError):
    """Another process of the run has ended or hangs. The last checkpoint is kept."""


@dataclass(frozen=True)
class Process:
    """Rank of this process in the run."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """True in the one process that writes files and messages."""
        return self.rank == 0

    def any_rank(self, flag: bool) -> bool:
        """Return True if `flag` is set in any process."""
        # A tensor on the CPU is exchanged between hosts: nothing waits for a GPU.
        count = torch.tensor(int(flag))
        if self.world_size > 1:
            dist.all_reduce(count)
        return bool(count)

    def broadcast(self, value: T) -> T:
        """Return the main process's `value`, in every process."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def wait(self) -> None:
        """Wait until all processes have called this."""
        if self.world_size > 1:
            dist.barrier()


def current_process() -> Process:
    """Return this process's rank in torch's process group; rank 0 of 1 if there is no group."""
    if dist.is_available() and dist.is_initialized():
        return Process(dist.get_rank(), dist.get_world_size())
    return Process()


@contextmanager
def join_processes(device: str) -> Iterator[tuple[Process, str]]:
    """Join torchrun's process group, if there is one, and give this process and the name of its
    device: on GPUs each takes its own. Raises ProcessLostError if another has ended or hangs."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield Process(), device
        return

    # Messages of processes go from host to host, gradients from GPU to GPU.
    backends = "gloo"
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        backends = "cpu:gloo,cuda:nccl"
        device = str(choose_device(f"cuda:{os.environ['LOCAL_RANK']}"))
    process = Process(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.init_process_group(
        backends, store=_open_store(process), **vars(process), timeout=_START_TIMEOUT
    )
    try:
        yield process, device
    except RuntimeError as error:
        # gloo's errors have no class of their own
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        # The reason follows gloo's file and line.
        reason = first_line(error).rpartition("] ")[2]
        raise ProcessLostError(
            f"another of the {process.world_size} processes has ended or hangs (process"
            f" {process.rank}: {reason}); continue with --resume"
        ) from error
    finally:
        dist.destroy_process_group()


def _open_store(process: Process) -> Any:
    """Open the store in which the processes find each other.

    If torchrun restarts the processes of one machine, its store still holds their earlier entries,
    and they would call processes that have ended (https://github.com/pytorch/pytorch/issues/135712).
    Each start therefore has its own keys. With several machines that is not possible, because they
    count restarts differently.
    """
    store, _, _ = next(rendezvous("env://", **vars(process), timeout=_START_TIMEOUT))
    store.set_timeout(_START_TIMEOUT)
    prefix = "vit"
    is_restartable = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_restartable and os.environ.get("GROUP_WORLD_SIZE") == "1":
        prefix = f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}"
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
