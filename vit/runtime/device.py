"""Choose, describe and use a device: its precision, its memory, and copies to and from it."""

import gc
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeVar, cast, get_args

import torch
from torch import Tensor

from vit.runtime.arguments import Precision as Precision
from vit.runtime.arguments import check_choice, shorten

T = TypeVar("T")

# Linux's names for instructions that multiply bfloat16.
_BFLOAT16_FLAGS = ("amx_bf16", "avx512_bf16")


def choose_device(name: str) -> torch.device:
    """Choose the device of a run.

    A GPU becomes torch's current device. Otherwise pinned memory and random numbers would open a
    second context, which takes 300 MB, on the first card. Attention on a GPU is no longer computed
    by cuDNN afterwards.

    Args:
        name: auto (a CUDA GPU if there is one), cpu, cuda, cuda:N or mps (a GPU of Apple).

    Raises:
        ValueError: The name is unknown, or this machine has no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu(:0)?|cuda(:[0-9]{1,3})?|mps(:0)?", name):
        raise ValueError(f"unknown device {shorten(name)!r}; use auto, cpu, cuda, cuda:N or mps")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if device.type == "mps":
        if not torch.backends.mps.is_available():
            raise ValueError("train.device mps: torch finds no GPU of Apple here; use auto or cpu")
        return device

    if not torch.cuda.is_available():
        raise ValueError(f"train.device {name}: torch finds no CUDA device here; use auto or cpu")
    if (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"train.device {name}: this machine has {torch.cuda.device_count()} CUDA devices"
        )
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(device)
    # torch prefers cuDNN's attention on an H100 or H200, but its backward pass can be NaN (see
    # `vit.model.attention`, which guards our models). This guards other models.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def choose_precision(name: str, device: torch.device) -> Precision:
    """Choose the precision of a forward pass.

    Args:
        name: float32, bfloat16, float16 or auto. With auto: bfloat16 if the hardware multiplies it
            natively, else float16 on a GPU with tensor cores for it (V100, T4, RTX 20), else
            float32.
        device: Device that computes the forward pass.

    Raises:
        ValueError: The name is unknown.
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
    elif cpu_multiplies_bfloat16():
        return "bfloat16"
    return "float32"


def use_deterministic_algorithms(deterministic: bool) -> None:
    """Let torch compute each operation in the same order every time, or in any order.

    Args:
        deterministic: True: the same order, with a slower kernel where necessary.
    """
    # Setting it imports torch's compiler, which takes 3 s.
    if deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic)
    # Without this line torch fills every new tensor, a debugging aid.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Return the context in which a forward pass uses `precision`; float32 changes nothing."""
    return torch.autocast(device.type, getattr(torch, precision), enabled=precision != "float32")


def count_free_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU's memory that tensors can use: the driver's free memory, and the
    memory that torch keeps of freed tensors."""
    backend = torch.get_device_module(device)
    if device.type == "mps":
        return int(backend.recommended_max_memory() - backend.driver_allocated_memory())
    cached = backend.memory_reserved(device) - backend.memory_allocated(device)
    return int(backend.mem_get_info(device)[0] + cached)


@lru_cache
def count_total_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU's memory, free or not."""
    backend = torch.get_device_module(device)
    if device.type == "mps":
        return int(backend.recommended_max_memory())
    return int(backend.mem_get_info(device)[1])


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
    """Compute images `start` to `stop` (exclusive) in parts that fit into memory.

    A part that doesn't fit into a GPU's memory is computed again with half as many images, as are
    all later parts.

    Args:
        run: `run(first, end)` computes the images from number `first` to `end` (exclusive).
        start: Number of the first image.
        stop: Number after the last image.
        part_size: Largest number of images in a part.
        device: Device that computes them.

    Returns:
        The number of images in a part that fits.

    Raises:
        torch.OutOfMemoryError: A single image doesn't fit.
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
    description = platform.processor() or platform.machine()
    if names := _read_cpuinfo("model name"):
        description = f"{names[0]}, {len(names)} cores"
    for flag in _BFLOAT16_FLAGS:
        if flag in cpu_flags():
            return f"{device.type} ({description}, {flag})"
    return f"{device.type} ({description})"


def cpu_multiplies_bfloat16() -> bool:
    """Return True if the processor has instructions for bfloat16. Without them it is slower than
    float32."""
    return not cpu_flags().isdisjoint(_BFLOAT16_FLAGS)


@lru_cache
def cpu_flags() -> frozenset[str]:
    """Return Linux's names of the processor's features (`amx_bf16`, …); none on other systems."""
    return frozenset(" ".join(_read_cpuinfo("flags")[:1]).split())


@lru_cache
def _read_cpuinfo(key: str) -> list[str]:
    """Return a property of every core from Linux's /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    return re.findall(rf"^{key}\s*:[ \t]*(.*?)[ \t]*$", text, re.MULTILINE)


def copy_to_device(values: T, device: torch.device) -> T:
    """Return `values` with its tensors on `device`, also those in lists, tuples and dictionaries.

    All of them are copied at once, and nothing waits for the copy; tensors in pinned memory are
    copied alone. For a CPU they are the same tensors.
    """
    if device.type in ("cpu", "mps"):
        # a GPU of Apple shares the memory of its host
        return cast(T, _map_tensors(values, lambda tensor: tensor.to(device)))
    tensors = [tensor for tensor in list_tensors(values) if not tensor.is_pinned()]
    # The tensors are small: one copy of all takes a fraction of the time of one copy for each.
    # When the copy is done, torch keeps the pinned memory for the next batch.
    size = sum(_pad(tensor.nbytes) for tensor in tensors)
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    for tensor, part in zip(tensors, _unpack(packed, tensors), strict=True):
        part.copy_(tensor)
    copies = _unpack(packed.to(device, non_blocking=True), tensors)

    def send(tensor: Tensor) -> Tensor:
        if tensor.is_pinned():
            return tensor.to(device, non_blocking=True)
        return next(copies)

    return cast(T, _map_tensors(values, send))


def _pad(num_bytes: int) -> int:
    """Return the next multiple of 16, at which a tensor of any type may begin."""
    return -(-num_bytes // 16) * 16


def _unpack(packed: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield views of the bytes in `packed` with the types and shapes of `tensors`."""
    start = 0
    for tensor in tensors:
        part = packed[start : start + tensor.nbytes]
        yield part.view(tensor.dtype).view(tensor.shape)
        start += _pad(tensor.nbytes)


def copy_to_host(values: T) -> T:
    """Return `values` with its tensors on the host, also those in lists, tuples and dictionaries.
    Those that are there already are the same tensors."""
    return cast(T, _map_tensors(values, lambda tensor: tensor.detach().cpu()))


def list_tensors(values: object) -> list[Tensor]:
    """Return the tensors in lists, tuples and dictionaries, in order."""
    tensors: list[Tensor] = []
    _map_tensors(values, tensors.append)
    return tensors


def _map_tensors(values: object, function: Callable[[Tensor], object]) -> object:
    """Return `values` with each tensor replaced by `function` of it, in order."""
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, Mapping):
        return {key: _map_tensors(value, function) for key, value in values.items()}
    if isinstance(values, list | tuple):
        mapped = [_map_tensors(value, function) for value in values]
        make: Callable[..., object] = type(values)
        # a named tuple takes its values one by one
        return make(*mapped) if hasattr(values, "_fields") else make(mapped)
    return values
