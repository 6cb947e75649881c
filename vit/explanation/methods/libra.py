"""LibraGrad's gradients (Mehri et al., CVPR 2025, section 3.5) of any model: relevance is lost neither in the attention
nor in norms and activations, so that a logit is the sum of input times gradient over its inputs and biases.

Each rule replaces a nonlinear function by the linear one that gives the same result on this input: what multiplies the
signal (attention weights, the gate of an activation, the standard deviation of a norm) counts as a constant, and of a
product of two signals each takes half. Only gradients change: results of the forward pass are bit-equal, fused
attention stays on, and the model is not touched.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]


class LibraGradients(TorchFunctionMode):
    """A context: the gradient of what is computed inside it follows LibraGrad's rules. Differentiate where you like."""

    def __torch_function__(
        self, func: Function, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = _RULES.get(func)
        return func(*args, **(kwargs or {})) if rule is None else rule(func, *args, **(kwargs or {}))


def _swap(result: Tensor, linear: Tensor) -> Tensor:
    """`result` with the gradient of `linear`. The brackets keep the value to the last bit."""
    return result.detach() + (linear - linear.detach())


def _scale_input(func: Function, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """x · [f(x) / x] of an activation with f(0) = 0, such as GELU, SiLU and the square; the bracket is a constant."""
    result: Tensor = func(input, *args, **kwargs)
    if not result.requires_grad:
        return result
    plain = func.__name__ == "square"
    gate = input if plain else torch.where(input == 0, 0.5, result / torch.where(input == 0, 1.0, input))
    return _swap(result, input * gate.detach())


def _normalise(func: Function, *args: Any, **kwargs: Any) -> Tensor:
    """Layer and RMS norm with the deviation as a constant."""
    result: Tensor = func(*args, **kwargs)
    if not result.requires_grad:
        return result
    is_layer_norm = func is F.layer_norm
    names = ("input", "normalized_shape", "weight", *(["bias"] if is_layer_norm else []), "eps")
    given: dict[str, Any] = dict.fromkeys(names) | dict(zip(names, args, strict=False)) | kwargs
    tokens: Any = given["input"]
    eps = (1e-5 if is_layer_norm else torch.finfo(tokens.dtype).eps) if given["eps"] is None else given["eps"]
    dims = tuple(range(-len(given["normalized_shape"]), 0))
    centred = tokens - tokens.mean(dim=dims, keepdim=True) if is_layer_norm else tokens
    linear = centred * (centred.detach().square().mean(dim=dims, keepdim=True) + eps).rsqrt()
    linear = linear if given["weight"] is None else linear * given["weight"]
    return _swap(result, linear if given.get("bias") is None else linear + given["bias"])


def _detach_result(func: Function, *args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = func(*args, **kwargs)
    return result.detach()


def _attend(func: Function, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = func(query.detach(), key.detach(), *args, **kwargs)
    return result


def _attend_projected(func: Function, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """`nn.MultiheadAttention` in one piece. Computed twice: other arguments would take another path to the result."""
    result, weights = func(query, key, *args, **kwargs)
    if result.requires_grad:
        value, size, num_heads, weight, bias, *others = args
        if bias is not None:  # of queries and keys a constant
            bias = torch.cat([bias[: 2 * size].detach(), bias[2 * size :]])
        projected = (query.detach(), key.detach(), value, size, num_heads, weight, bias)
        result = _swap(result, func(*projected, *others, **kwargs)[0])
    return result, weights


def _multiply(func: Function, input: Any, other: Any, **kwargs: Any) -> Tensor:
    result: Tensor = func(input, other, **kwargs)
    if isinstance(input, Tensor) and isinstance(other, Tensor) and input.requires_grad and other.requires_grad:
        return _swap(result, (input * other.detach() + input.detach() * other) / 2)
    return result


_RULES: dict[Function, Function] = {
    **dict.fromkeys((F.gelu, F.silu, torch.square, Tensor.square), _scale_input),
    **dict.fromkeys((F.layer_norm, F.rms_norm), _normalise),
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax, torch.sigmoid, Tensor.sigmoid), _detach_result),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__), _multiply),
    F.scaled_dot_product_attention: _attend,
    F.multi_head_attention_forward: _attend_projected,
}
