"""How the process uses the host's memory."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory for the next allocation; whether it could be asked to. By default glibc maps
    every large temporary afresh and returns it when it is freed, so each step faults its pages in again: 166,000 faults
    a step of 256 images, a fifth of its time (timm's ViT d=192 L=9, explicit attention, 2-core Zen 5). The process's
    size then stays at its peak."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is None:
        return False
    settings = {_M_MMAP_THRESHOLD: 2**30, _M_TRIM_THRESHOLD: 2**31 - 1, _M_TOP_PAD: 64 * 2**20}
    return all(mallopt(parameter, value) == 1 for parameter, value in settings.items())
