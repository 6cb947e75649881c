"""What `torch.compile` is told of functions."""

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def constant_when_compiled(function: Function) -> Function:
    """`torch.compiler.assume_constant_result`, without what that does first: import torch's compiler, which took 2 s of
    the 5 s that every command needed to start (Zen 4)."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
