"""Where a loss or gradient stopped being finite."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def find_nonfinite(model: nn.Module, images: Tensor, targets: Tensor | None = None) -> str | None:
    """Name of the first module whose output, or of the first parameter whose gradient, is not finite.

    Runs `model` again on the batch that failed; call it under the same autocast. None where all is finite.
    The forward pass is searched first, then with `targets` the gradients of the cross-entropy from the head
    down. Leaves no gradient behind.
    """
    found: list[str] = []

    def watch(name: str) -> Any:
        def check(module: nn.Module, arguments: Any, output: Any) -> None:
            if not found and isinstance(output, Tensor) and not torch.isfinite(output).all():
                found.append(name)

        return check

    hooks = [module.register_forward_hook(watch(name or "model")) for name, module in model.named_modules()]
    try:
        logits = model(images)
    finally:
        for hook in hooks:
            hook.remove()
    if found or targets is None:
        return found[0] if found else None
    loss = F.cross_entropy(logits.float(), targets)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, [parameter for _, parameter in named], allow_unused=True)
    for (name, _), gradient in reversed(list(zip(named, gradients, strict=True))):
        if gradient is not None and not torch.isfinite(gradient).all():
            return f"gradient of {name}"
    return None


def describe_nonfinite(step: int, *, module: str | None, image_names: list[str]) -> str:
    """The error of a run that stops at `step`, with the cure."""
    names = ", ".join(image_names[:8]) + (f", … ({len(image_names)})" if len(image_names) > 8 else "")
    return (
        f"step {step}: the loss or a gradient is not finite; first seen in {module or 'the optimizer step'}; "
        f"images {names}; the last good checkpoint is kept. Lower optimizer.lr, set train.clip_grad, "
        "or skip such steps with train.on_nonfinite=skip"
    )
