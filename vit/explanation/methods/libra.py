"""LibraGrad's gradients (Mehri et al., CVPR 2025, section 3.5) for any model. No relevance is lost
in attention, norms and activations, so that a logit is the sum of input times gradient over its
inputs and biases.

Each rule replaces a nonlinear function by the linear one that has the same result on this input.
The factors of the signal (attention weights, the gate of an activation, the standard deviation of a
norm) are constants, and each factor of a product of two signals gets half. Only gradients change:
results of the forward pass are bit-equal, fused attention stays on, and the model doesn't change.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Arguments = tuple[Any, ...]
Options = dict[str, Any]
# from the result and the arguments of a function to the result with another gradient
Rule = Callable[[Any, Arguments, Options], Any]


class LibraGradients(TorchFunctionMode):
    """Context in which results get gradients by LibraGrad's rules. The backward pass may run
    outside of it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Arguments = (),
        kwargs: Options | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            # attention weights are constants, so the gradient goes through the values alone
            query, key, *others = args
            args = (query.detach(), key.detach(), *others)
        result = func(*args, **kwargs)
        rule = _RULES.get(func)
        return result if rule is None else rule(result, args, kwargs)


def _swap(result: Tensor, linear: Tensor) -> Tensor:
    """Give `result` the gradient of `linear`. The brackets keep the value bit-equal."""
    return result.detach() + (linear - linear.detach())


def _scale_input(result: Tensor, args: Arguments, kwargs: Options) -> Tensor:
    """Write an activation with f(0) = 0, such as GELU and SiLU, as x · [f(x) / x] with a constant
    bracket."""
    if not result.requires_grad:
        return result
    input: Tensor = args[0]
    # at 0 the quotient is not defined: take the slope of GELU and SiLU
    is_zero = input == 0
    gate = torch.where(is_zero, 0.5, result / torch.where(is_zero, 1.0, input))
    return _swap(result, input * gate.detach())


def _square(result: Tensor, args: Arguments, kwargs: Options) -> Tensor:
    return _multiply(result, (args[0], args[0]), kwargs)


def _normalise(result: Tensor, args: Arguments, kwargs: Options) -> Tensor:
    """Compute layer norm or RMS norm with a constant deviation."""
    if not result.requires_grad:
        return result
    tokens, normalized_shape = args
    dims = tuple(range(-len(normalized_shape), 0))
    eps = kwargs["eps"]
    if eps is None:  # torch's default of RMS norm
        eps = torch.finfo(tokens.dtype).eps
    if "bias" in kwargs:  # layer norm
        tokens = tokens - tokens.mean(dim=dims, keepdim=True)
    linear = tokens * (tokens.detach().square().mean(dim=dims, keepdim=True) + eps).rsqrt()
    if kwargs["weight"] is not None:
        linear = linear * kwargs["weight"]
    if kwargs.get("bias") is not None:
        linear = linear + kwargs["bias"]
    return _swap(result, linear)


def _detach(result: Tensor, args: Arguments, kwargs: Options) -> Tensor:
    return result.detach()


def _multiply(result: Tensor, args: Arguments, kwargs: Options) -> Tensor:
    input, other = args
    for factor in args:
        # a number or a constant: the product is linear as it is
        if not isinstance(factor, Tensor) or not factor.requires_grad:
            return result
    return _swap(result, (input * other.detach() + input.detach() * other) / 2)


def _attend_projected(
    outputs: tuple[Tensor, Any], args: Arguments, kwargs: Options
) -> tuple[Tensor, Any]:
    """Compute `nn.MultiheadAttention`, a single function, a second time for its gradient: other
    arguments in the first computation would change the rounding."""
    result, weights = outputs
    if result.requires_grad:
        query, key, value, size, num_heads, weight, bias, *others = args
        # the projections of queries and keys are constants, as the attention weights are
        if bias is not None:
            bias = torch.cat([bias[: 2 * size].detach(), bias[2 * size :]])
        projected = (query.detach(), key.detach(), value, size, num_heads, weight, bias)
        linear, _ = F.multi_head_attention_forward(*projected, *others, **kwargs)
        result = _swap(result, linear)
    return result, weights


_RULES: dict[Callable[..., Any], Rule] = {
    # activations: a gate times the input
    F.gelu: _scale_input,
    F.silu: _scale_input,
    torch.square: _square,
    Tensor.square: _square,
    # norms: a constant times the input
    F.layer_norm: _normalise,
    F.rms_norm: _normalise,
    # gates and attention weights: constants
    F.softmax: _detach,
    torch.softmax: _detach,
    Tensor.softmax: _detach,
    torch.sigmoid: _detach,
    Tensor.sigmoid: _detach,
    # products of two signals: half to each
    torch.mul: _multiply,
    Tensor.mul: _multiply,
    Tensor.__mul__: _multiply,
    F.multi_head_attention_forward: _attend_projected,
}
