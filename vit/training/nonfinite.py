"""Where a loss or gradient stopped being finite."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def find_nonfinite(model: nn.Module, images: Tensor, targets: Tensor | None = None) -> str | None:
    """Name of the first module whose output, or of the first parameter whose gradient, is not finite; else None. Runs
    `model` again on the batch that failed; call it under the same autocast. The forward pass is searched first, then
    with `targets` the gradients of the cross-entropy from the head down. Leaves no gradient behind."""
    found: list[str] = []
    names = {module: name or "model" for name, module in model.named_modules()}

    def check(module: nn.Module, arguments: Any, output: Any) -> None:
        if not found and isinstance(output, Tensor) and not torch.isfinite(output).all():
            found.append(names[module])

    hooks = [module.register_forward_hook(check) for module in names]
    try:
        logits = model(images)
    finally:
        for hook in hooks:
            hook.remove()
    if found or targets is None:
        return found[0] if found else None
    loss = F.cross_entropy(logits.float(), targets)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    for name, gradient in reversed(list(zip(named, gradients, strict=True))):
        if gradient is not None and not torch.isfinite(gradient).all():
            return f"gradient of {name}"
    return None
