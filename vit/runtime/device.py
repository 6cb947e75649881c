"""Which device and precision a run uses, how they are named, and copies to and from it."""

import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TypeVar, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from vit.runtime.arguments import Precision as Precision
from vit.runtime.arguments import check_choice, shorten

T = TypeVar("T")


def choose_device(name: str) -> torch.device:
    """`auto` is a GPU where there is one. Raises ValueError where the named device is not here."""
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if not re.fullmatch(r"cpu(:0)?|cuda(:[0-9]{1,3})?", name):
        raise ValueError(f"unknown device {shorten(name)!r}; use auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"train.device {name}: no CUDA device is visible here; use auto or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"train.device {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def choose_precision(name: str, device: torch.device) -> Precision:
    """`auto` is bfloat16 where the hardware multiplies it natively, else float32."""
    check_choice(name, ("auto", *get_args(Precision)), name="precision")
    if name != "auto":
        return cast(Precision, name)
    is_cuda = device.type == "cuda"
    is_native = torch.cuda.is_bf16_supported(including_emulation=False) if is_cuda else cpu_multiplies_bfloat16()
    return "bfloat16" if is_native else "float32"


def use_deterministic_algorithms(deterministic: bool) -> None:
    """Whether an operation is computed in the same order each time, by a slower kernel where that takes one."""
    if deterministic != torch.are_deterministic_algorithms_enabled():  # torch imports its compiler to set it, 3 s
        torch.use_deterministic_algorithms(deterministic)
    # else every new tensor is written twice, a debugging aid
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def describe_device(device: torch.device) -> str:
    """The device's product name, for reports and benchmarks."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = _read_cpuinfo("model name")
    cpu = f"{names[0]}, {len(names)} cores" if names else platform.processor() or platform.machine()
    extensions = [name for name in ("amx_bf16", "avx512_bf16") if name in cpu_flags()]
    return f"{device.type} ({cpu}{', ' + extensions[0] if extensions else ''})"


def cpu_multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for it; without them bfloat16 is slower than float32."""
    return bool({"amx_bf16", "avx512_bf16"} & cpu_flags())


@lru_cache
def cpu_flags() -> frozenset[str]:
    """The processor's features by Linux's names (`amx_bf16`, `avx512_bf16`, …); none on other systems."""
    return frozenset(" ".join(_read_cpuinfo("flags")[:1]).split())


@lru_cache
def _read_cpuinfo(key: str) -> list[str]:
    """A property of every core, as Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return [value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip() == key]


def copy_to_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Tensors of the host on `device`, by one copy that nothing waits for; for a CPU, the same tensors."""
    if device.type == "cpu":
        return dict(tensors)
    # each begins where any type may; torch keeps pinned memory for the next batch, once the copy is done
    starts = list(accumulate((-(-tensor.nbytes // 16) * 16 for tensor in tensors.values()), initial=0))
    packed = torch.empty(starts.pop(), dtype=torch.uint8, pin_memory=True)
    for tensor, part in zip(tensors.values(), _unpack(packed, tensors, starts), strict=True):
        part.copy_(tensor)
    return dict(zip(tensors, _unpack(packed.to(device, non_blocking=True), tensors, starts), strict=True))


def _unpack(packed: Tensor, tensors: Mapping[str, Tensor], starts: Sequence[int]) -> Iterator[Tensor]:
    for tensor, start in zip(tensors.values(), starts, strict=True):
        yield packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def copy_to_host(values: T) -> T:
    """`values` with its tensors, also those in lists, tuples and dictionaries, on the host: by one copy, which waits
    for the device."""
    leaves, structure = tree_flatten(values)
    sent = {str(place): leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not leaf.is_cpu}
    if sent:
        # cloned, since torch takes one element for contiguous at any stride, and `view` doesn't
        whole = torch.contiguous_format
        parts = [leaf.detach().clone(memory_format=whole).view(-1).view(torch.uint8) for leaf in sent.values()]
        packed = torch.cat([F.pad(part, (0, -len(part) % 16)) for part in parts]).cpu()
        starts = accumulate((-(-len(part) // 16) * 16 for part in parts[:-1]), initial=0)
        for place, part in zip(sent, _unpack(packed, sent, list(starts)), strict=True):
            leaves[int(place)] = part.clone()  # a part that is kept would keep the whole
    return cast(T, tree_unflatten(leaves, structure))


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """The context in which a forward pass runs in `precision`; float32 changes nothing."""
    return torch.autocast(device.type, getattr(torch, precision), enabled=precision != "float32")
