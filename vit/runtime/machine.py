"""Cores and memory of this machine, on every operating system."""

import math
import os
import shutil
from pathlib import Path

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
    # takes a tenth of a second to import
    import psutil

    free = int(psutil.virtual_memory().available)
    cgroup = Path("/sys/fs/cgroup")
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        # no such limit, or "max"
        return free
    return min(free, limit - used)


def has_fast_disk(folder: Path) -> bool:
    """Return true if Linux knows that a folder is on an SSD of this machine."""
    blocks = Path("/sys/dev/block")
    if not blocks.is_dir():
        return False
    number = os.stat(folder).st_dev
    disk = (blocks / f"{os.major(number)}:{os.minor(number)}").resolve()
    # a partition has no queue of its own
    for place in (disk, disk.parent):
        if (place / "queue/rotational").is_file():
            return (place / "queue/rotational").read_text().strip() == "0"
    return False
