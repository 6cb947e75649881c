"""A pretend accelerator: the device "npu", whose tensors each hold a CPU tensor.

It runs real values through the code that a GPU would run, on a machine without one, and is as
strict as a GPU: an operation that mixes a host tensor (of more than zero dimensions) with a device
tensor raises, and so does `.numpy()` of a device tensor. Every transfer and every wait is counted
with the line of ours that caused it (`TRANSFERS`).

    with pretend_device():
        model.to("npu")
        ...

A copy to the device from memory that is not pinned is a wait too: the host goes on when the copy is
done.

It can't show kernels that exist on one kind of device only, CUDA's own numerics, streams and
overlap. Of memory it shows the sum of live tensors, where a test sets `MEMORY.limit`.
`torch.inference_mode` and wrapper tensors don't go together, so `no_grad` takes its place
meanwhile. Autocast casts what the matrix products, convolutions and the fused attention take, as it
does on a CPU. torch's experimental
`torch.utils.backend_registration._setup_privateuseone_for_python_backend` (2.10 and later) makes
the device known to autograd; a TorchDispatchMode does the rest.
"""

import collections
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

import vit

_OURS = os.path.join(os.path.dirname(vit.__file__), "")
TRANSFERS: collections.Counter[str] = collections.Counter()
_WAITS = {
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
}
_WAITS |= {
    "unique_consecutive",
    "bincount",
    "repeat_interleave",
    "_linalg_svd",
    "linalg_inv_ex",
    "_linalg_solve_ex",
}
# backward passes that CUDA refuses where a run is deterministic, the default
_NOT_DETERMINISTIC = {
    "upsample_bicubic2d_backward",
    "_upsample_bicubic2d_aa_backward",
    "_upsample_bilinear2d_aa_backward",
    "grid_sampler_2d_backward",
}


class _Memory:
    """Bytes of the device's live tensors, by their storages; counted while there is a limit."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self.allocated = self.peak = 0
        self.num_tensors: collections.Counter[int] = collections.Counter()

    def add(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        if self.limit is None:
            return
        storage = host.untyped_storage()
        if not self.num_tensors[storage._cdata]:
            if self.allocated + storage.nbytes() > self.limit:
                raise torch.OutOfMemoryError("the pretend device has no memory left")
            self.allocated += storage.nbytes()
            self.peak = max(self.peak, self.allocated)
        self.num_tensors[storage._cdata] += 1
        weakref.finalize(tensor, self._release, storage._cdata, storage.nbytes())

    def _release(self, storage: int, num_bytes: int) -> None:
        self.num_tensors[storage] -= 1
        if not self.num_tensors[storage]:
            self.allocated -= num_bytes

    def reset_peak(self) -> None:
        self.peak = self.allocated


MEMORY = _Memory()


class _Backend:
    """What torch asks of a device's module."""

    in_use = (
        False  # outside `pretend_device`, torch must not take it for this machine's accelerator
    )
    is_available = is_initialized = staticmethod(lambda: _Backend.in_use)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    manual_seed_all = synchronize = set_rng_state = staticmethod(lambda *_: None)
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    memory_allocated = memory_reserved = staticmethod(lambda *_: MEMORY.allocated)
    max_memory_allocated = staticmethod(lambda *_: MEMORY.peak)
    reset_peak_memory_stats = staticmethod(lambda *_: MEMORY.reset_peak())
    empty_cache = staticmethod(lambda: None)
    mem_get_info = staticmethod(
        lambda *_: ((MEMORY.limit or 2**36) - MEMORY.allocated, MEMORY.limit or 2**36)
    )
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


_setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
if _setup is None:
    torch.utils.rename_privateuse1_backend("npu")  # the name is known, and that is all
else:
    _setup("npu", backend_module=_Backend())
_AUTOCAST = torch.library.Library("_", "IMPL")
_AUTOCAST.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # `_Functions` casts
_IN_HALF_PRECISION = {
    F.linear,
    F.conv2d,
    F.scaled_dot_product_attention,
    torch.matmul,
    torch.Tensor.matmul,
}
_IN_HALF_PRECISION |= {
    torch.bmm,
    torch.Tensor.bmm,
    torch.mm,
    torch.Tensor.mm,
    torch.addmm,
    torch.baddbmm,
}
_IN_HALF_PRECISION |= {torch.Tensor.__matmul__, torch.einsum}


class DeviceTensor(torch.Tensor):
    """A tensor on the pretend device; `host` holds its values."""

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "DeviceTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device="npu:0",
        )

    def __init__(self, host: torch.Tensor) -> None:
        MEMORY.add(self, host)
        self.host = host

    def __repr__(self) -> str:
        return f"npu{list(self.shape)}"

    def __reduce_ex__(
        self, protocol: Any
    ) -> Any:  # torch.save copies what lies on a device, and reads it anywhere
        _count("device→host")
        return self.host.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for child in value:
            yield from _leaves(child)
    else:
        yield value


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """torch's `tree_map`, for lists, tuples and dictionaries alone: a quicker one, of which a step
    needs thousands."""
    if isinstance(value, dict):
        return {key: _map(change, child) for key, child in value.items()}
    return (
        type(value)(_map(change, child) for child in value)
        if type(value) in (list, tuple)
        else change(value)
    )


def _on_device(value: Any) -> bool:
    return isinstance(value, DeviceTensor)


def _host(value: Any) -> Any:
    return value.host if _on_device(value) else value


def _is_npu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "npu"


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if _on_device(value) and value.dtype == torch.float32 else value


def _count(what: str) -> None:
    frame = sys._getframe()
    while frame.f_back and not frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    file = frame.f_code.co_filename
    place = f"{file.removeprefix(_OURS)}:{frame.f_lineno}" if file.startswith(_OURS) else "?"
    TRANSFERS[f"{what} {place}"] += 1


def _count_copy(source: Any, to_device: bool, non_blocking: Any) -> None:
    if _on_device(source) != to_device:
        _count("host→device" if to_device else "device→host")
        if to_device and not (non_blocking and getattr(source, "pretends_to_be_pinned", False)):
            _count("wait (copy of unpinned memory)")


def _find_host_scalars(kind: str, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Host tensors without dimensions, which CUDA takes as numbers, where it does not: anywhere in
    operations on many tensors, in other operations' lists, and as what is written to."""
    many = [value for value in args if isinstance(value, list | tuple)]
    candidates = [leaf for value in many for leaf in value] + [*_leaves(kwargs.get("out"))]
    if kind.startswith(("_fused_", "_foreach_")):
        candidates = [*_leaves((args, kwargs))]
    elif kind.endswith("_") and not many:
        candidates.append(args[0])
    return [
        tensor
        for tensor in candidates
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 0 and not _on_device(tensor)
    ]


def _run(op: Any, args: Any, kwargs: Any) -> Any:
    name = str(op).removeprefix("aten.")
    tensors = [value for value in _leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    uses_device = any(map(_on_device, tensors))
    host_kwargs = {
        k: torch.device("cpu") if isinstance(v, torch.device) else _map(_host, v)
        for k, v in kwargs.items()
    }
    if name.startswith("_to_copy"):
        source, to_device = args[0], _is_npu(kwargs.get("device") or args[0].device)
        _count_copy(source, to_device, kwargs.get("non_blocking"))
        for key in ("non_blocking", "pin_memory"):
            host_kwargs.pop(key, None)
        copy = op(_host(source), **host_kwargs)
        return DeviceTensor(copy) if to_device else copy
    if name == "copy_.default":
        target, source = args[:2]
        _count_copy(source, _on_device(target), kwargs.get("non_blocking") or args[2:] == (True,))
        _host(target).copy_(_host(source))
        return target
    kind = name.partition(".")[0]
    by_mask = kind == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])
    if uses_device and (kind in _WAITS or by_mask):
        _count(f"wait ({kind})")
    if uses_device and kind in _NOT_DETERMINISTIC:
        raise RuntimeError(f"{name} has no deterministic implementation on CUDA")
    if uses_device and (strays := _find_host_scalars(kind, args, kwargs)):
        raise RuntimeError(f"{name}: {len(strays)} host scalars where CUDA takes none")
    for tensor in tensors:
        if uses_device and not _on_device(tensor) and tensor.dim() > 0:
            if "index" in name and tensor.dtype in (
                torch.int64,
                torch.bool,
            ):  # CUDA takes these, by a copy
                _count("host→device")
                _count("wait (copy of unpinned memory)")
            else:
                raise RuntimeError(
                    f"{name}: a host tensor {list(tensor.shape)} among device tensors"
                )
    result = op(*_map(_host, args), **host_kwargs)
    if name == "_local_scalar_dense.default" or not (uses_device or _is_npu(kwargs.get("device"))):
        return result
    wrapped = _map(
        lambda value: DeviceTensor(value) if isinstance(value, torch.Tensor) else value, result
    )
    if any(
        r.alias_info is not None and r.alias_info.is_write for r in op._schema.returns
    ):  # in place, out=
        return return_and_correct_aliasing(op, args, kwargs, wrapped)
    return wrapped


class _Dispatch(TorchDispatchMode):
    supports_higher_order_operators = True  # those of torch.export, which works on the host

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_npu(kwargs.get("device")) or any(map(_on_device, _leaves((args, kwargs)))):
            return _run(op, args, kwargs)
        return op(*args, **kwargs)


class _Functions(TorchFunctionMode):
    """What never reaches the dispatcher."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in _IN_HALF_PRECISION and torch.is_autocast_enabled("npu"):
            dtype = torch.get_autocast_dtype("npu")
            args, kwargs = _map(lambda value: _cast(value, dtype), (args, kwargs))
            with torch.autocast("npu", enabled=False):
                return function(*args, **kwargs)
        if kwargs.get("pin_memory") and function is torch.empty:
            pinned = function(*args, **kwargs | {"pin_memory": False})
            pinned.pretends_to_be_pinned = True
            return pinned
        if function is torch.Tensor.is_pinned:
            return getattr(args[0], "pretends_to_be_pinned", False)
        if function in (torch.tensor, torch.as_tensor) and _is_npu(kwargs.get("device")):
            device = kwargs.pop("device")
            return function(*args, **kwargs).to(device)
        if function is torch.Tensor.new_tensor and _on_device(args[0]):
            return torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)).to("npu")
        if function is torch.Tensor.tolist and _on_device(args[0]):
            _count("wait (tolist)")
            return args[0].host.tolist()
        if function is torch.Tensor.numpy and _on_device(args[0]):
            raise TypeError("can't convert a device tensor to numpy; copy it to the host first")
        return function(*args, **kwargs)


_data_ptr = torch.UntypedStorage.data_ptr


def _address(storage: torch.UntypedStorage) -> int:
    try:
        return _data_ptr(storage)
    except (
        RuntimeError
    ):  # a wrapper tensor's storage holds no memory; any name that is its own will do
        return int(storage._cdata)


def _enter(mode: Any) -> None:
    mode.before = torch.is_grad_enabled()
    torch.set_grad_enabled(not mode.mode)


def _leave(mode: Any, *_: object) -> None:
    torch.set_grad_enabled(mode.before)


@contextmanager
def pretend_device() -> Iterator[collections.Counter[str]]:
    """Make "npu" work for as long as this lasts; gives the counter of transfers and waits."""
    if _setup is None:
        pytest.skip(f"torch {torch.__version__} can't have a device that is written in Python")
    TRANSFERS.clear()
    with pytest.MonkeyPatch.context() as patch, _Functions(), _Dispatch():
        patch.setattr(torch.UntypedStorage, "data_ptr", _address)
        patch.setattr(torch.inference_mode, "__enter__", _enter)
        patch.setattr(torch.inference_mode, "__exit__", _leave)
        patch.setattr(_Backend, "in_use", True)
        patch.setattr(MEMORY, "limit", None)
        yield TRANSFERS
