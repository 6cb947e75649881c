"""A pretend CUDA graph: the operations of a step on a CPU, recorded once and run again.

As with CUDA's, nothing is computed while it is captured, as far as anyone can see; a replay computes
the same operations with the same numbers on whatever lies at the same addresses then, takes new
random numbers, and leaves its results where the captured ones were. As with NCCL's, what processes
exchange is captured without waiting for them; `exchange_alone` has to be called first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def list_tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


class _Capture(TorchDispatchMode):
    """Records operations, and keeps what they write over."""

    current: "_Capture | None" = None
    alone: Any = None

    def __init__(self, graph: "PretendGraph") -> None:
        super().__init__()
        self.graph = graph
        self.made: set[int] = set()
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        for argument, value in zip(op._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(list_tensors(value))
        self._keep(list_tensors(kwargs.get("out")))
        if op.namespace == "c10d":
            result = self._exchange_nothing(args)
        else:
            result = op(*args, **kwargs)
        given = {tensor.untyped_storage()._cdata for tensor in list_tensors((args, kwargs))}
        for tensor in list_tensors(result):
            if tensor.untyped_storage()._cdata not in given:
                self.made.add(tensor.untyped_storage()._cdata)
        self.graph.operations.append((op, args, kwargs, result))
        return result

    def _exchange_nothing(self, args: Any) -> Any:
        _, work = torch.ops.c10d.broadcast_(list_tensors(args[0]), self.alone, 0, 0)
        work.wait()
        return args[0], work

    def _keep(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.made:
                self.before.setdefault(storage._cdata, (storage, storage.clone()))


class CaptureHooks(TorchDispatchMode):
    """Surrounds the making of DistributedDataParallel, whose hooks run with the modes of that time."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _Capture.current is not None:
            return _Capture.current.__torch_dispatch__(op, types, args, kwargs)
        return op(*args, **(kwargs or {}))


class PretendGraph:
    """Takes the place of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    @torch.no_grad()
    def replay(self) -> None:
        for op, args, kwargs, captured in self.operations:
            result = op(*args, **kwargs)
            if op.namespace == "c10d":
                result[-1].wait()
                continue
            for place, value in zip(list_tensors(captured), list_tensors(result), strict=True):
                # views and what is written in place are there already
                if place.untyped_storage()._cdata != value.untyped_storage()._cdata:
                    place.detach().copy_(value)

    @staticmethod
    def is_captured() -> bool:
        return _Capture.current is not None

    def reset(self) -> None:
        self.operations.clear()


def exchange_alone() -> None:
    """Make the group of one process in which captured exchanges come to nothing. All processes call it."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    _Capture.alone = groups[dist.get_rank()].boxed()


@contextmanager
def pretend_capture(graph: PretendGraph, *, stream: None = None) -> Iterator[None]:
    """Takes the place of `torch.cuda.graph`."""
    random_state = torch.get_rng_state()
    capture = _Capture.current = _Capture(graph)
    try:
        with capture:
            yield
    finally:
        _Capture.current = None
        for storage, content in capture.before.values():
            storage.copy_(content)
        torch.set_rng_state(random_state)
