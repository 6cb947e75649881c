"""Compiling the training step: when it pays, and a function that torch compiles if it can."""

import os
import shutil
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from vit.runtime.arguments import first_line

# FLOPs at one image size from which compiling for that size pays. CPU: the step gains 8 to 13 % and
# compiling takes 32 s (2-core Zen 5), even after 6 minutes at 0.45 TFLOP/s. CUDA: assumed, 30 % and
# 60 s at 80 TFLOP/s.
_WORTHWHILE_FLOPS = {"cpu": 1.6e14, "cuda": 1.6e16}

# Forms of one function that are compiled. Blocks are one function, and differ in `drop_path_rate`.
_MAX_COMPILED = 1024

# The first torch that can compile the backward pass with the forward pass.
_OLDEST_TORCH = "2.10"


def should_compile(device_type: str, *, total_flops: float, num_sizes: int = 1) -> bool:
    """Return whether compiling the training step pays. Nothing is measured for it, so that a
    resumed run decides as the interrupted one did.

    Args:
        device_type: "cpu", "cuda" or another of torch's names.
        total_flops: FLOPs of the whole run, forward and backward.
        num_sizes: Image sizes of the run; torch compiles for each.
    """
    pays = total_flops / num_sizes >= _WORTHWHILE_FLOPS.get(device_type, float("inf"))
    compilers = (os.environ.get("CXX", "c++"), "g++", "clang++")
    has_compiler = any(shutil.which(compiler) for compiler in compilers)
    return pays and has_compiler and torch.__version__ >= _OLDEST_TORCH


def _name_attention_kernels() -> str:
    """Return the kernels that torch's attention may use, as a word of the key under which compiled
    code is kept."""
    flags: Any = torch.backends.cuda
    enabled = {
        "flash": flags.flash_sdp_enabled(),
        "efficient": flags.mem_efficient_sdp_enabled(),
        "cudnn": flags.cudnn_sdp_enabled(),
        "math": flags.math_sdp_enabled(),
    }
    return "attention: " + " ".join(name for name, is_enabled in enabled.items() if is_enabled)


class CompiledFunction:
    """A function compiled by torch, or unchanged if torch can't compile it: without a C++ compiler
    or Python's headers, before torch 2.10, or for an operation that its compiler doesn't know.

    Args:
        function: Function whose result is differentiated. Its backward pass is compiled with it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._original = function
        # Products of float32 matrices keep their precision on purpose.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        # torch's cache of compiled code would return code with another kernel of attention than the
        # flags allow now (https://github.com/pytorch/pytorch/issues/185449).
        torch.compiler.config.cache_key_tag = _name_attention_kernels()
        # From the third image size on, torch would make sizes symbols, which a CUDA graph can't
        # have.
        self._function = torch.compile(function, dynamic=False)

    @property
    def is_compiled(self) -> bool:
        """False if torch could not compile it."""
        return self._function is not self._original

    def __call__(self, *args: Any) -> Any:
        if not self.is_compiled:
            return self._original(*args)
        try:
            if torch.__version__ < _OLDEST_TORCH:
                raise RuntimeError(f"torch {torch.__version__} is older than {_OLDEST_TORCH}")
            with (
                # Otherwise the backward pass is compiled when it runs, too late to do without it.
                torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
                # Each image size, rate of dropped patches and length of a micro-batch is compiled.
                # Beyond torch's limits of 8 and 256 the rest would not be, without a word.
                torch._dynamo.config.patch(
                    recompile_limit=_MAX_COMPILED, accumulated_recompile_limit=_MAX_COMPILED
                ),
            ):
                return self._function(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # Nothing was computed yet. An error of the function itself is raised again below.
            self._function = self._original
            warnings.warn(
                f"torch could not compile the training step ({first_line(error)}); "
                "training goes on without it",
                stacklevel=2,
            )
            return self._original(*args)


class CompiledBlocks(CompiledFunction):
    """A function of a model whose encoder blocks are compiled, each alone. Equal blocks share their
    code, and the loss is not part of it, so that an image size takes a fraction of the time of
    `CompiledFunction`. In several processes the gradients of a block are exchanged while the next
    one's are computed.

    Args:
        function: Function that runs the model.
        blocks: The model's encoder blocks. Whoever runs them otherwise runs them as they are.
    """

    def __init__(self, function: Callable[..., Any], blocks: Iterable[nn.Module]) -> None:
        super().__init__(function)
        self._blocks = {block: torch.compile(block.forward, dynamic=False) for block in blocks}
        self._function = self._run

    def _run(self, *args: Any) -> Any:
        for block, forward in self._blocks.items():
            block.forward = forward
        try:
            return self._original(*args)
        finally:
            for block in self._blocks:
                # the method of the class
                del block.forward
