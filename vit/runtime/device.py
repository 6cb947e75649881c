"""Choose, describe and use a device: its precision, its memory, and copies to and from it."""

import gc
import os
import platform
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar, cast, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from vit.runtime.arguments import Precision as Precision
from vit.runtime.arguments import check_choice, shorten

T = TypeVar("T")

# Linux's names for instructions that multiply bfloat16, which is slow without them.
_BFLOAT16_FLAGS = ("amx_bf16", "avx512_bf16")


def choose_device(name: str) -> torch.device:
    """Choose the device of a run: auto (a CUDA GPU if there is one), cpu, cuda, cuda:N or mps (a
    GPU of Apple). Raises ValueError if this machine has no such device.

    A GPU becomes torch's current device. Otherwise pinned memory and random numbers would open a
    second context, which takes 300 MB, on the first card. Attention on a GPU is no longer computed
    by cuDNN afterwards.
    """
    counts = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }
    if name == "auto":
        name = "cuda" if counts["cuda"] else "cpu"
    kind, _, index = name.partition(":")
    if not re.fullmatch("[0-9]{0,3}", index) or int(index or 0) >= counts.get(kind, 0):
        raise ValueError(
            f"torch finds no device {shorten(name)!r} here; use auto, cpu, cuda, cuda:N or mps"
        )
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(device)
    # torch prefers cuDNN's attention on an H100 or H200, but its backward pass can be NaN (see
    # `vit.model.attention`, which guards our models). This guards other models.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def choose_precision(name: str, device: torch.device) -> Precision:
    """Choose the precision of a forward pass: auto is bfloat16 if the hardware multiplies it
    natively, else float16 on a GPU with tensor cores for it (V100, T4, RTX 20), else float32.
    """
    check_choice(name, ("auto", *get_args(Precision)), name="precision")
    if name != "auto":
        return cast(Precision, name)
    if device.type == "mps":
        return "float32"
    if device.type == "cuda":
        # torch answers for its current device only.
        with torch.cuda.device(device):
            if torch.cuda.is_bf16_supported(including_emulation=False):
                return "bfloat16"
        # Earlier cards multiply float16 no faster than float32.
        if torch.cuda.get_device_capability(device) >= (7, 0):
            return "float16"
    elif not cpu_flags().isdisjoint(_BFLOAT16_FLAGS):
        return "bfloat16"
    return "float32"


def use_deterministic_algorithms(deterministic: bool) -> None:
    """Let torch compute each operation in the same order every time, by a slower kernel where
    necessary, or in any order."""
    # Setting it imports torch's compiler, which takes 3 s.
    if deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic)
    # Without this line torch fills every new tensor, a debugging aid.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Return the context in which a forward pass uses `precision`; float32 changes nothing."""
    return torch.autocast(device.type, getattr(torch, precision), enabled=precision != "float32")


def count_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a GPU's memory that tensors can use, the driver's free memory and what
    torch keeps of freed tensors; and all of its bytes."""
    backend = torch.get_device_module(device)
    if device.type == "mps":
        total = int(backend.recommended_max_memory())
        return total - int(backend.driver_allocated_memory()), total
    free, total = backend.mem_get_info(device)
    cached = backend.memory_reserved(device) - backend.memory_allocated(device)
    return int(free + cached), int(total)


def free_cached_memory(device: torch.device) -> None:
    """Return the memory that torch keeps of freed tensors to a GPU's driver."""
    # Tensors in reference cycles are not freed yet.
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def run_in_memory(
    run: Callable[[int, int], object],
    start: int,
    stop: int,
    *,
    part_size: int,
    device: torch.device,
) -> int:
    """Compute images `start` to `stop` (exclusive) in parts that fit into a GPU's memory.

    A part that doesn't fit is computed again with half as many images, as are all later parts. If a
    single image doesn't fit, the error is raised. `run(first, end)` computes a part. Return the
    number of images in a part that fits.
    """
    while start < stop:
        end = min(start + part_size, stop)
        try:
            run(start, end)
        except torch.OutOfMemoryError:
            if end - start == 1:
                raise
        else:
            start = end
            continue
        # Freed here, because inside `except` the error still holds the tensors of the failed pass.
        part_size = (end - start) // 2
        free_cached_memory(device)
    return part_size


def describe_device(device: torch.device) -> str:
    """Return the device's product name, for reports and benchmarks."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    # The platform module only knows the architecture.
    name = _read_cpuinfo("model name") or platform.machine()
    flags = [flag for flag in _BFLOAT16_FLAGS if flag in cpu_flags()]
    return f"{device.type} ({', '.join([name, f'{os.cpu_count()} cores', *flags])})"


@lru_cache
def cpu_flags() -> frozenset[str]:
    """Return Linux's names of the processor's features (`amx_bf16`, …); none on other systems."""
    return frozenset(_read_cpuinfo("flags").split())


def _read_cpuinfo(key: str) -> str:
    """Return a property of the first core from Linux's /proc/cpuinfo; empty on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    values = (line.partition(":")[2] for line in text.splitlines() if line.startswith(key))
    return next(values, "").strip()


def copy_to_device(values: T, device: torch.device) -> T:
    """Return values with their tensors on a device, also in lists, tuples and dictionaries. All are
    copied at once, but those in pinned memory alone, and nothing waits for the copy. For a CPU they
    are the same tensors."""
    if device.type in ("cpu", "mps"):
        # a GPU of Apple shares the memory of its host
        return cast(T, tree_map_only(Tensor, lambda tensor: tensor.to(device), values))
    leaves = tree_leaves(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_pinned()]
    # The tensors are small: one copy of all takes a fraction of the time of one copy for each. Each
    # begins at a multiple of 16 bytes, as a tensor of any type may.
    sizes = [-(-tensor.nbytes // 16) * 16 for tensor in tensors]
    # When the copy is done, torch keeps the pinned memory for the next batch.
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for tensor, part in zip(tensors, torch.split(packed, sizes), strict=True):
        _view_as(tensor, part).copy_(tensor)
    copies = iter(torch.split(packed.to(device, non_blocking=True), sizes))

    def send(tensor: Tensor) -> Tensor:
        if tensor.is_pinned():
            return tensor.to(device, non_blocking=True)
        return _view_as(tensor, next(copies))

    return cast(T, tree_map_only(Tensor, send, values))


def _view_as(tensor: Tensor, memory: Tensor) -> Tensor:
    """View the first bytes as a tensor of the same type and shape."""
    return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def copy_to_host(values: T) -> T:
    """Return values with their tensors on the host, see `copy_to_device`."""
    return cast(T, tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), values))
