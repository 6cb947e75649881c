"""Check LibraGrad's promise for a model: the number that is explained is the sum of input times
gradient over the pixels and everything that is added on the way (biases, position embeddings, class
tokens)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vit.explanation.capture.forward import evaluation_mode
from vit.explanation.methods.libra import LibraGradients, map_tensors
from vit.explanation.targets import Target
from vit.model.logits import compute_logits
from vit.runtime.device import list_tensors
from vit.runtime.tensors import Images

_TOLERANCE = 0.01  # largest error that is not reported
# The error is a fraction of the number, or of this fraction of the parts that add up to it: in
# float32, a number that is nearly 0 is mostly rounding.
_LEAST_FRACTION = 0.01
_LOST = "_libra_lost"  # attribute of tensors that depend on the image without a gradient


def measure_completeness_error(model: nn.Module, images: Images, target: Target) -> float | None:
    """The error of the sum as a fraction of the number explained; None if it is at most 1 %."""
    images = images.detach().clone().requires_grad_()
    with (
        evaluation_mode(model),
        torch.enable_grad(),
        torch.autocast(images.device.type, enabled=False),
    ):
        with _ConstantsMeter() as meter:
            logits = compute_logits(model, images)
            classes = target.select([0]).choose(logits.detach())[:, 0]
            score = target.score(logits, classes)
        if not score.requires_grad:
            score = target.score(logits, classes)
    (gradient,) = torch.autograd.grad(score.sum(), images)
    inputs = float((images.detach() * gradient).sum())
    number = float(score.detach())
    scale = max(abs(number), _LEAST_FRACTION * (abs(inputs) + abs(meter.total)))
    error: float = abs(inputs + meter.total - number) / max(scale, torch.finfo(torch.float32).tiny)
    if error <= _TOLERANCE:
        return None
    return error


class _ConstantsMeter(LibraGradients):
    """LibraGrad's gradients, and the sum of constant times gradient over all functions. A
    function's constant is its result if its signals are 0: a bias, a token, a position embedding.

    Attributes:
        total: The sum, after a backward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        has_signals = False

        def silence(tensor: Tensor) -> Tensor:
            nonlocal has_signals
            is_signal = tensor.requires_grad or hasattr(tensor, _LOST)
            has_signals |= is_signal
            if is_signal and tensor.is_floating_point():
                return torch.zeros_like(tensor)
            return tensor

        quiet, options = map_tensors(silence, args), map_tensors(silence, kwargs)
        if quiet and isinstance(quiet[0], Tensor):  # a function may write into it
            quiet = (quiet[0].clone(), *quiet[1:])
        result = super().__torch_function__(func, types, args, kwargs)
        if not has_signals:
            return result

        # `x[0] = y` returns None
        changed = list_tensors(args[0] if result is None else result)
        if any(tensor.requires_grad for tensor in changed):
            try:
                with torch.no_grad():
                    constants = func(*quiet, **options)
            except (RuntimeError, ValueError, IndexError):  # such as the inverse of zeros
                return result
            constants = list_tensors(quiet[0] if result is None else constants)
            for tensor, constant in zip(changed, constants, strict=True):
                constant = constant.nan_to_num(0.0, 0.0, 0.0)  # 0 / 0
                if tensor.requires_grad and constant.any():
                    hook: Callable[..., object] = tensor.register_hook
                    hook(partial(self._add, constant))
        elif not func.__name__.startswith("new_") and not func.__name__.endswith("_like"):
            for tensor in changed:
                setattr(tensor, _LOST, True)
        return result

    def _add(self, constant: Tensor, gradient: Tensor) -> None:
        self.total += float((constant * gradient).sum())
