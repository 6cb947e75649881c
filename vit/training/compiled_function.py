"""A function that torch compiles where it can."""

import warnings
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

from vit.runtime.arguments import first_line

P = ParamSpec("P")
T = TypeVar("T")


class CompiledFunction(Generic[P, T]):
    """A function compiled by torch, or as it is where torch can't compile it: without a C++
    compiler, without Python's headers, for an operation that its compiler doesn't know.

    Args:
        function: what it computes is differentiated; its backward pass is compiled with it.
    """

    def __init__(self, function: Callable[P, T]) -> None:
        self._original = function
        # products of float32 matrices keep their precision on purpose
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        # from the third image size on torch would make sizes symbols, which a CUDA graph can't have
        self._function = torch.compile(function, dynamic=False)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._function is self._original:
            return self._original(*args, **kwargs)
        try:
            # else the backward pass is compiled in the backward pass, when it is too late to do
            # without
            with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
                return self._function(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # nothing was computed yet; an error of the function itself comes again
            self._function = self._original
            warnings.warn(
                f"torch could not compile the training step ({first_line(error)}); "
                "training goes on without it",
                stacklevel=2,
            )
            return self._original(*args, **kwargs)
