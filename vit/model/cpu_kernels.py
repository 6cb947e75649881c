"""Faster computations for CPUs: the choice of an attention backend, and backward passes by hand.

Logits and gradients equal those of the plain formulas. Speed-ups are for a forward and backward
pass in bfloat16 on one core of a Zen 5 with avx512_bf16: 128 images of 64 tokens, 3 heads of 64.
"""

from contextlib import nullcontext
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

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

    # A Function with `setup_context`, which torch.func could transform, takes 3 to 6 % of the step
    # of a small model longer. `can_use_kernels` sends transforms to the formula instead.
    @staticmethod
    def forward(
        ctx: Any,
        query: Float[Tensor, "B H Nq K"],
        key: Float[Tensor, "B H Nk K"],
        value: Float[Tensor, "B H Nk V"],
    ) -> tuple[Float[Tensor, "B H Nq V"], Tensor, Tensor, Tensor, Tensor]:
        """Return the output, and what the backward pass reads: autograd differentiates that pass
        with respect to outputs only."""
        q, k, v = (part.flatten(0, 1) for part in (query, key, value))  # [B·H, N, K]
        weights = _multiply(q, k.mT, scale=q.shape[-1] ** -0.5).softmax(dim=-1)
        # Reading the weights takes less time than computing them again.
        ctx.save_for_backward(q, k, v, weights)
        ctx.set_materialize_grads(False)
        ctx.leading = query.shape[:2]
        return torch.unflatten(weights @ v, 0, ctx.leading), q, k, v, weights

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor | None, *grad_saved: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        # Only second derivatives have gradients of the saved tensors.
        *others, grad_weights = grad_saved
        grads: list[Tensor | None] = [None, None, None]
        if grad_output is not None:
            grad_output = grad_output.flatten(0, 1)  # [B·H, Nq, V]
            grads[2] = weights.mT @ grad_output
            grad_weights = _add(grad_output @ v.mT, grad_weights)
        if grad_weights is not None:
            # Autograd runs this operation. The same formula in Python rounds twice and is slower.
            grad_scores = torch.ops.aten._softmax_backward_data(
                grad_weights, weights, -1, weights.dtype
            )
            grads[0] = _multiply(grad_scores, k, scale=scale)
            grads[1] = _multiply(grad_scores.mT, q, scale=scale)
        sums = (_add(grad, other) for grad, other in zip(grads, others, strict=True))
        return tuple(
            None if part is None else torch.unflatten(part, 0, ctx.leading) for part in sums
        )


def _add(gradient: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Add two gradients, of which None is zero."""
    if gradient is None or other is None:
        return other if gradient is None else gradient
    return gradient + other


@constant_when_compiled
def can_use_kernels() -> bool:
    """Return whether backward passes by hand may be used: not inside the transforms of
    `torch.func`."""
    return not torch._C._are_functorch_transforms_active()


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
    def forward(ctx: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return max(x, 0)² and, see `ExplicitAttention`, max(x, 0)."""
        positive = hidden.relu()
        ctx.save_for_backward(positive)
        ctx.set_materialize_grads(False)
        return positive * positive, positive

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, grad_positive: Tensor | None) -> Tensor | None:
        (positive,) = ctx.saved_tensors
        if gradient is not None:
            gradient = torch.addcmul(gradient.new_zeros(()), gradient, positive, value=2)
        if grad_positive is None:
            return gradient
        return _add(gradient, grad_positive * (positive > 0))


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
