"""The processes of one run, as torchrun starts them."""

import os
import time
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

# until the first step: one machine may decode images that another has
_START_TIMEOUT = timedelta(hours=1)
# within which the processes that are left say so
_ANSWER_SECONDS = 5.0


class ProcessLostError(ConnectionError):
    """Another process of the run has ended or hangs.

    The run can be continued from its last checkpoint.
    """


@dataclass(frozen=True)
class Process:
    """This process's place in the run."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether it is the one process that writes files and messages."""
        return self.rank == 0

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is set in any process."""
        if self.world_size == 1:
            return flag
        # it goes from host to host: nothing waits for a GPU
        num_flags = torch.tensor(float(flag))
        dist.all_reduce(num_flags)
        return bool(num_flags)

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

    def set_timeout(self, seconds: float) -> None:
        """Fail an exchange between hosts that another process has not joined for `seconds`.

        Each training step has one, which fails before NCCL's watchdog ends the process without a
        name.
        """
        if self.world_size > 1 and (group := dist.group.WORLD) is not None:
            group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=seconds))


def current_process() -> Process:
    """This process's place in torch's process group; the only one where there is no group."""
    if dist.is_available() and dist.is_initialized():
        return Process(dist.get_rank(), dist.get_world_size())
    return Process()


@contextmanager
def join_processes(device: str) -> Iterator[tuple[Process, str]]:
    """Join torchrun's process group, where there is one.

    Args:
        device: the name of the user's; on GPUs each process takes its own.

    Yields:
        This process and its device.

    Raises:
        ProcessLostError: another process has ended or hangs; the message names it.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield Process(), device
        return

    # what processes tell one another goes from host to host, gradients from GPU to GPU
    backends = "gloo"
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        backends = "cpu:gloo,cuda:nccl"
        device = str(choose_device(f"cuda:{os.environ['LOCAL_RANK']}"))
    process = Process(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    store = _open_store(process)
    dist.init_process_group(
        backends,
        store=store,
        rank=process.rank,
        world_size=process.world_size,
        timeout=_START_TIMEOUT,
    )
    try:
        yield process, device
    except RuntimeError as error:
        if not is_lost(error):
            raise
        raise ProcessLostError(_describe_loss(process, store, error)) from error
    finally:
        dist.destroy_process_group()


def _open_store(process: Process) -> Any:
    """The store in which the processes find one another.

    Where torchrun started the processes of one machine again, what they said before is still in its
    store, and they would call processes that are gone
    (https://github.com/pytorch/pytorch/issues/135712): each start has keys of its own. Several
    machines don't count restarts alike.
    """
    store, _, _ = next(
        rendezvous(
            "env://", rank=process.rank, world_size=process.world_size, timeout=_START_TIMEOUT
        )
    )
    store.set_timeout(_START_TIMEOUT)
    is_restartable = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_restartable and os.environ.get("GROUP_WORLD_SIZE") == "1":
        prefix = f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}"
        return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    return dist.PrefixStore("vit", store)  # type: ignore[attr-defined]


def is_lost(error: BaseException) -> bool:
    """Whether this is what torch raises where another process does not answer."""
    # which has no class for it
    is_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    return isinstance(error, dist.DistError) or is_gloo


def _describe_loss(process: Process, store: Any, error: RuntimeError) -> str:
    """A sentence that names the processes that do not answer.

    All that lost one come here at the same time, and say so in the store.
    """
    # those that answer within some seconds are alive, but for a delay of the network
    silent = set(range(process.world_size))
    deadline = time.monotonic() + _ANSWER_SECONDS
    try:
        store.set(f"vit/{process.rank}", "here")
        while silent and time.monotonic() < deadline:
            silent = {rank for rank in silent if not store.check([f"vit/{rank}"])}
            time.sleep(0.05)
    except dist.DistError:
        # the store was that of process 0, which ends first if it found the loss first: one that has
        # answered is not the cause
        if process.rank != 0 and 0 in silent:
            silent = {0}
    silent.discard(process.rank)

    lost = "a connection was lost"
    if silent:
        names = " and ".join(map(str, sorted(silent)))
        lost = f"process {names} of {process.world_size} has ended or hangs"
    # behind gloo's file and line
    reason = first_line(error).rpartition("] ")[2]
    return f"{lost} (process {process.rank}: {reason}); continue with --resume"
