"""LibraGrad's gradients (Mehri et al., CVPR 2025, section 3.5) for any model. No relevance is lost
in attention, norms and activations, so that a logit is the sum of input times gradient over its
inputs and biases.

Each rule replaces a nonlinear function by the affine one that has the same result on this input:

- Attention weights, denominators and the deviations of norms are constants.
- An activation f(x) is f(0) + x · g with the constant g = (f(x) - f(0)) / x. f(0) is a bias. An
  activation with two bounds, such as the sigmoid, is a constant where it multiplies another signal.
- A function of degree k, such as x^k or a product of k signals, gets 1/k of its gradient, because
  Σ x ∂f/∂x = k f (Euler's theorem).

Only gradients change: results of the forward pass are bit-equal, and fused attention stays on.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

Call = partial[Tensor]  # a function with its keyword arguments
Rule = Callable[..., Any]  # calls a function with inputs so that its result gets another gradient

_GATE = "_libra_gate"  # attribute of the result of an activation with two bounds
# names of inputs that may be passed by keyword, in their order
_INPUTS = ("input", "query", "key", "value", "other", "exponent")


class LibraGradients(TorchFunctionMode):
    """Context in which results get LibraGrad's gradients. The backward pass may run outside."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        rule = _RULES.get(func)
        if rule is not None:
            args = (*args, *(kwargs.pop(name) for name in _INPUTS if name in kwargs))
        signals = _list_signals((args, kwargs))
        if not signals or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        in_place = _IN_PLACE.get(func, func if rule and kwargs.get("inplace") else None)
        if in_place is not None:
            # rules need the input, which would be overwritten
            kwargs.pop("inplace", None)
            inputs = (args[0].clone(), *args[1:])
            return args[0].copy_(
                LibraGradients.__torch_function__(self, in_place, types, inputs, kwargs)
            )

        call = partial(func, **kwargs)
        result = call(*args) if rule is None else rule(call, *args)
        if func in _KEEPS_GATES and all(hasattr(signal, _GATE) for signal in signals):
            setattr(result, _GATE, True)
        return result


def _list_signals(value: Any) -> list[Tensor]:
    leaves = tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _swap(result: Tensor, linear: Tensor) -> Tensor:
    """Give `result` the gradient of `linear`. The brackets keep the value bit-equal."""
    return result.detach() + (linear - linear.detach())


def _weigh_gradient(weight: float | Tensor, value: Any) -> Any:
    """Return arguments whose tensors have `weight` times their gradient."""

    def weigh(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        weighted = tensor.view_as(tensor)
        hook: Callable[..., object] = weighted.register_hook
        hook(lambda gradient: gradient * weight)
        return weighted

    return tree_map_only(Tensor, weigh, value)


def _hold(call: Call, *args: Any) -> Tensor:
    """Take the result as a constant."""
    return call(*args).detach()


def _hold_inputs(held: slice, call: Call, *args: Any) -> Tensor:
    """Take some inputs as constants."""
    inputs = list(args)
    inputs[held] = tree_map_only(Tensor, Tensor.detach, inputs[held])
    return call(*inputs)


def _activate(call: Call, input: Tensor, *bounds: Any) -> Tensor:
    """Write f(x) as f(0) + x · [(f(x) - f(0)) / x] with a constant bracket."""
    result = call(input, *bounds)
    # at 0 the bracket is the slope
    with torch.enable_grad():
        zero = input.new_zeros((), requires_grad=True)
        start = call(zero, *bounds)
        (slope,) = torch.autograd.grad(start.sum(), zero)
    is_zero = input == 0
    gate = torch.where(is_zero, slope, (result - start) / torch.where(is_zero, 1.0, input))
    return _swap(result, input * gate.detach())


def _open_gate(call: Call, *args: Any) -> Tensor:
    result = _activate(call, *args)
    setattr(result, _GATE, True)
    return result


def _multiply(call: Call, *args: Any) -> Tensor:
    """Give each of several signals an equal share, and gates none."""
    signals = _list_signals(args)
    if len(signals) < 2:
        return call(*args)
    if not all(hasattr(signal, _GATE) for signal in signals):
        args = tree_map_only(Tensor, _hold_gate, args)
    return call(*_weigh_gradient(1 / len(_list_signals(args)), args))


def _hold_gate(tensor: Tensor) -> Tensor:
    return tensor.detach() if hasattr(tensor, _GATE) else tensor


def _apply_degree(degree: float, call: Call, *args: Any) -> Tensor:
    return call(*_weigh_gradient(1 / degree, args))


def _raise(call: Call, base: Any, exponent: Any) -> Tensor:
    """Compute a power. Negative powers are denominators, and so constants."""
    is_power = isinstance(base, Tensor) and not _list_signals(exponent)
    # a learnt power has to be read from its device
    if not is_power or bool(torch.as_tensor(exponent <= 0).any()):
        return _hold(call, base, exponent)
    return call(_weigh_gradient(1 / exponent, base), exponent)


def _normalise(call: Call, signal: Tensor, size: Any) -> Tensor:
    """Normalise by a constant deviation."""
    result, options = call(signal, size), call.keywords
    weight, bias = options["weight"], options.get("bias")
    if isinstance(size, int):
        # the places and channels of a group; each channel's parameters go over its places
        groups = torch.unflatten(signal, 1, (size, -1)).flatten(2)  # [B, G, n]
        shape = (-1, *[1] * (signal.ndim - 2))
        weight, bias = (None if one is None else one.reshape(shape) for one in (weight, bias))
    else:
        groups = signal.flatten(-len(size))
    # RMS norm has no bias, and torch's default of its eps
    if "bias" in options:
        groups = groups - groups.mean(dim=-1, keepdim=True)
    eps = options["eps"]
    if eps is None:
        eps = torch.finfo(signal.dtype).eps
    variance = groups.detach().square().mean(dim=-1, keepdim=True)
    linear = (groups * (variance + eps).rsqrt()).reshape(result.shape)
    if weight is not None:
        linear = linear * weight
    if bias is not None:
        linear = linear + bias
    return _swap(result, linear)


def _normalise_length(call: Call, input: Tensor) -> Tensor:
    """Divide by a constant norm."""
    options = call.keywords
    norm = torch.linalg.vector_norm(input, options["p"], options["dim"], keepdim=True)
    return _swap(call(input), input / norm.clamp_min(options["eps"]).detach())


def _attend_projected(call: Call, *args: Any) -> tuple[Tensor, Any]:
    """Compute `nn.MultiheadAttention` a second time for its gradient: constants in the first
    computation would change the rounding."""
    result, weights = call(*args)
    query, key, value, size, num_heads, weight, bias, *others = args
    # queries and keys are constants, as the attention weights are
    if bias is not None:
        bias = torch.cat([bias[: 2 * size].detach(), bias[2 * size :]])
    projected = (query.detach(), key.detach(), value, size, num_heads, weight, bias)
    linear, _ = call(*projected, *others)
    return _swap(result, linear), weights


def _find_spellings(names: str) -> Iterator[Callable[..., Any]]:
    """Find the functions and methods of these names."""
    for name in names.split():
        for space in (torch, Tensor, F):
            if hasattr(space, name):
                yield getattr(space, name)


_NAMES: dict[Rule, str] = {
    _activate: "gelu silu mish hardswish elu celu selu relu6 hardtanh clamp clip clamp_min "
    "clamp_max softplus softsign tanhshrink hardshrink softshrink logsigmoid expm1 log1p",
    _open_gate: "sigmoid hardsigmoid tanh erf",
    # attention weights, and what they are written out with
    _hold: "softmax exp exp2 rsqrt reciprocal __rdiv__ __rtruediv__ __rpow__",
    # the denominator
    partial(_hold_inputs, slice(1, None)): "div divide true_divide __div__ __truediv__",
    _multiply: "mul multiply __mul__ matmul __matmul__ mm bmm mv dot einsum bilinear",
    _raise: "pow __pow__",
    partial(_apply_degree, 2.0): "square var",
    partial(_apply_degree, 0.5): "sqrt",
    _normalise: "layer_norm rms_norm group_norm",
    _normalise_length: "normalize",
    # queries and keys, so that the gradient goes through the values alone
    partial(_hold_inputs, slice(2)): "scaled_dot_product_attention",
    _attend_projected: "multi_head_attention_forward",
}
_RULES = {func: rule for rule, names in _NAMES.items() for func in _find_spellings(names)}
# torch.layer_norm and others of the same name as one of F take other arguments
for _name in ("layer_norm", "rms_norm", "group_norm"):
    _RULES.pop(getattr(torch, _name), None)

_IN_PLACE = {
    getattr(Tensor, in_place): getattr(Tensor, name)
    for name in " ".join(_NAMES.values()).split()
    for in_place in (f"{name}_", name.replace("__", "__i", 1))
    if in_place != name and hasattr(Tensor, name) and hasattr(Tensor, in_place)
}
# A gate in another shape, or with a constant added or multiplied, is still a gate.
_KEEPS_GATES = set(
    _find_spellings(
        "add __add__ __radd__ sub __sub__ __rsub__ mul __mul__ __rmul__ div __truediv__ "
        "unsqueeze squeeze view reshape expand expand_as transpose permute flatten unflatten "
        "__getitem__ to float contiguous"
    )
)
