"""Faster computations for CPUs: the choice of an attention backend, and backward passes by hand.

Logits and gradients equal those of the plain formulas. Speed-ups are for a forward and backward
pass in bfloat16 on one core of a Zen 5 with avx512_bf16: 128 images of 64 tokens, 3 heads of 64.
"""

from contextlib import nullcontext
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vit.runtime.device import cpu_flags, cpu_multiplies_bfloat16
from vit.runtime.threads import constant_when_compiled

Backend = Literal["auto", "fused", "explicit"]

MAX_EXPLICIT_TOKENS = 640


def choose_backend(
    device_type: str,
    dtype: torch.dtype,
    num_tokens: int,
    training: bool,
) -> Backend:
    """Choose the faster of torch's fused kernel and two explicit products.

    The fused kernel is faster except for bfloat16 on a CPU. There its backward pass takes two to
    five times as long, and without AMX inference is slower too. Beyond a few hundred tokens, the
    explicit weights exceed the caches (`research/attention.py`).
    """
    if device_type != "cpu" or dtype != torch.bfloat16 or num_tokens > MAX_EXPLICIT_TOKENS:
        return "fused"
    if training or not _has_amx():
        return "explicit"
    return "fused"


class ExplicitAttention(torch.autograd.Function):
    """softmax(Q Kᵀ / √d_k) V for training.

    It is 1.08 times as fast as with autograd, and 3.8 times as fast as torch's fused kernel. Each
    operand is copied into the layout of the products once, and the products apply 1 / √d_k.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Float[Tensor, "B H Nq K"],
        key: Float[Tensor, "B H Nk K"],
        value: Float[Tensor, "B H Nk V"],
    ) -> Float[Tensor, "B H Nq V"]:
        q, k, v = (part.flatten(0, 1) for part in (query, key, value))  # [B·H, N, K]
        weights = _multiply(q, k.mT, scale=q.shape[-1] ** -0.5).softmax(dim=-1)
        # Reading the weights takes less time than computing them again.
        ctx.save_for_backward(q, k, v, weights)
        return torch.unflatten(weights @ v, 0, query.shape[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        q, k, v, weights = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        grad_output = gradient.flatten(0, 1)  # [B·H, Nq, V]
        # Autograd runs this operation. The same formula in Python rounds twice and is slower.
        grad_scores = torch.ops.aten._softmax_backward_data(
            grad_output @ v.mT, weights, -1, weights.dtype
        )
        gradients = (
            _multiply(grad_scores, k, scale=scale),
            _multiply(grad_scores.mT, q, scale=scale),
            weights.mT @ grad_output,
        )
        return tuple(torch.unflatten(part, 0, gradient.shape[:2]) for part in gradients)


def _multiply(
    left: Float[Tensor, "M R I"],
    right: Float[Tensor, "M I C"],
    *,
    scale: float,
) -> Float[Tensor, "M R C"]:
    """Compute scale · left @ right, rounded once."""
    ignored = left.new_empty(()).expand(left.shape[0], left.shape[1], right.shape[2])
    return torch.baddbmm(ignored, left, right, beta=0, alpha=scale)


class SquaredReLU(torch.autograd.Function):
    """max(x, 0)² for training, 1.8 times as fast as with autograd.

    The backward pass of autograd reads and writes its tensors three times, this one once.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        positive = hidden.relu()
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return torch.addcmul(gradient.new_zeros(()), gradient, positive, value=2)


def apply_convolutions(images: Tensor, stem: nn.Module, proj: nn.Module) -> Tensor:
    """Compute proj(stem(images)) with the faster kernels."""
    # Compiled max pooling takes longer than all the rest of a small model.
    compiling = torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()
    convolve = _convolve_uncompiled if compiling and images.is_cpu else _convolve

    # Without bfloat16 instructions, the weight gradient of a convolution takes over ten times as
    # long in bfloat16 as in float32 (256 images, 32 px, 2 cores).
    in_float32 = images.is_cpu and not _has_bfloat16()
    with torch.autocast("cpu", enabled=False) if in_float32 else nullcontext():
        # Channels last is faster for 3×3 convolutions, and the tokens are then a view.
        return convolve(images.contiguous(memory_format=torch.channels_last), stem, proj)


def _convolve(images: Tensor, stem: nn.Module, proj: nn.Module) -> Tensor:
    features: Tensor = proj(stem(images))
    return features


# torch.compiler.disable does the same, but first imports torch's compiler, which takes 3 s.
_convolve_uncompiled = torch._disable_dynamo(_convolve)  # type: ignore[attr-defined]


# These are constants for the compiler: reading processor flags would break its graph.


@constant_when_compiled
def _has_amx() -> bool:
    return "amx_bf16" in cpu_flags()


@constant_when_compiled
def _has_bfloat16() -> bool:
    return cpu_multiplies_bfloat16()
