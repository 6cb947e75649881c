"""Cores and memory of this machine, on every operating system."""

import math
import os
import shutil
import sys
from pathlib import Path

import psutil

# Processes that decode images beyond which one training process gains little.
_MAX_WORKERS = 16


def count_workers() -> int:
    """Return the number of processes that decode images for this process: the cores that it may use,
    divided among the processes of the run on this machine, and at most 16."""
    # takes a tenth of a second to import
    from joblib import cpu_count  # type: ignore[import-untyped]

    cores: int = cpu_count()
    return min(max(cores // _count_local_processes(), 1), _MAX_WORKERS)


def _count_local_processes() -> int:
    """Return the number of processes of the run on this machine."""
    # torchrun sets it
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def count_free_shared_memory() -> float:
    """Return this process's share of the bytes that are free in /dev/shm, through which torch's worker
    processes send tensors; infinity on systems without it."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return math.inf
    return free / _count_local_processes()


def count_free_memory() -> int:
    """Return the bytes that the system says are available or, if less, that the container's limit
    leaves."""
    free = int(psutil.virtual_memory().available)
    cgroup = Path("/sys/fs/cgroup")
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        # no such limit, or "max"
        return free
    return min(free, limit - used)


def measure_peak_memory() -> int:
    """Return the largest resident set of this process so far, in bytes."""
    try:
        import resource
    except ImportError:
        # Windows
        memory = psutil.Process().memory_info()
        return int(getattr(memory, "peak_wset", memory.rss))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
