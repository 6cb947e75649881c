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

from vit.runtime.arguments import first_line

T = TypeVar("T")
_START_TIMEOUT = timedelta(hours=1)  # until the first step: one machine may decode images that another has
_ANSWER_SECONDS = 5.0  # within which the processes that are left say so


class LostProcess(ConnectionError):
    """Another process of the run has ended or hangs; the run can be continued from its last checkpoint."""


@dataclass(frozen=True)
class Process:
    """This process's place in the run."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """The one process that writes files and messages."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set in any process."""
        return max(self.gather(flag)) > 0 if self.world_size > 1 else flag

    def gather(self, value: float) -> list[float]:
        """Every process's `value`, by rank. It goes from host to host, so nothing waits for a GPU."""
        values = torch.zeros(self.world_size, dtype=torch.float64)
        values[self.rank] = value
        if self.world_size > 1:
            dist.all_reduce(values)
        return values.tolist()

    def broadcast(self, value: T) -> T:
        """The main process's `value`, in every process."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def exchange(self, value: T) -> list[T]:
        """Every process's `value`, by rank, in every process."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.world_size > 1:
            dist.barrier()

    def limit_waits(self, seconds: float) -> None:
        """From now on, an exchange between hosts fails that another process has not joined for `seconds`. Each training
        step has one, which fails before NCCL's watchdog ends the process without a name."""
        if self.world_size > 1 and (group := dist.group.WORLD) is not None:
            group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=seconds))


def current_process() -> Process:
    """This process's place in torch's process group; the only one where there is no group."""
    grouped = dist.is_available() and dist.is_initialized()
    return Process(dist.get_rank(), dist.get_world_size()) if grouped else Process()


@contextmanager
def join_processes(device: str) -> Iterator[tuple[Process, str]]:
    """Join torchrun's process group (gloo, on GPUs NCCL beside it), where there is one; yields this process and its
    device. Raises LostProcess, with a sentence that names it, where another process ends or hangs."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield Process(), device
        return
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_gpu:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    backends = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backends, store=_open_store(), rank=rank, world_size=world_size, timeout=_START_TIMEOUT)
    try:
        yield current_process(), device
    except RuntimeError as error:
        if not is_lost(error):
            raise
        raise LostProcess(_describe_loss(current_process(), error)) from error
    finally:
        dist.destroy_process_group()


def _open_store() -> Any:
    """Where the processes that torchrun started again on one machine find one another: what they said before is still
    in torchrun's store, and they would call processes that are gone (https://github.com/pytorch/pytorch/issues/135712).
    None, torch's own, for several machines, which don't count restarts alike."""
    said = os.environ.get
    if said("TORCHELASTIC_USE_AGENT_STORE") != "True" or said("GROUP_WORLD_SIZE") != "1":
        return None
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=_START_TIMEOUT
    )
    return dist.PrefixStore(  # type: ignore[attr-defined]
        f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store
    )


def is_lost(error: BaseException) -> bool:
    """Whether this is what torch raises where another process does not answer; gloo's errors have no class."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _describe_loss(process: Process, error: RuntimeError) -> str:
    """Which processes do not answer. All that lost one come here at the same time, and say so in torch's store."""
    silent = set(range(process.world_size))
    try:
        store, until = dist.distributed_c10d._get_default_store(), time.monotonic() + _ANSWER_SECONDS
        store.set(f"vit/{process.rank}", "here")
        while silent and time.monotonic() < until:
            silent = {rank for rank in silent if not store.check([f"vit/{rank}"])}
            time.sleep(0.05)
    except dist.DistError:
        silent = {0} if process.rank else silent  # the store was its
    names = " and ".join(map(str, sorted(silent - {process.rank})))
    lost = f"process {names} of {process.world_size} has ended or hangs" if names else "a connection was lost"
    reason = first_line(error).rpartition("] ")[2]  # behind gloo's file and line
    return f"{lost} (process {process.rank}: {reason}); continue with --resume"
