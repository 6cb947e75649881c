"""Cores and memory of this machine, on every operating system."""

import os
from pathlib import Path

# Processes that decode images beyond which one training process gains little.
_MAX_WORKERS = 16


def count_workers() -> int:
    """Return the number of processes that decode images for this process: the cores that it may use,
    divided among the processes of the run on this machine, and at most 16."""
    # takes a tenth of a second to import
    from joblib import cpu_count  # type: ignore[import-untyped]

    cores: int = cpu_count()
    # torchrun sets it
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(cores // processes, 1), _MAX_WORKERS)


def count_free_memory() -> int:
    """Return the available bytes, of the system or of the container's limit."""
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
