"""Find where a loss or gradient stopped being finite."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def find_nonfinite(model: nn.Module, images: Tensor, targets: Tensor) -> str | None:
    """Run a model again on the batch that failed, and name the first place that is not finite.

    It leaves no gradient behind. Call it under the same autocast as the training step.

    Args:
        images: [B, 3, H, W].
        targets: Classes [B] or class probabilities [B, C]; a teacher's logits may follow.

    Returns:
        The first module whose output is not finite, or else the first parameter, from the head
        down, whose gradient of the cross-entropy is not; None where all are finite.
    """
    # modules with a value that is not finite, in the order of the forward pass
    modules: list[str] = []
    names = {module: name or "model" for name, module in model.named_modules()}

    def check(module: nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not torch.isfinite(output).all():
            modules.append(names[module])

    hooks = [module.register_forward_hook(check) for module in names]
    try:
        logits = model(images)
    finally:
        for hook in hooks:
            hook.remove()
    if modules:
        return modules[0]

    if targets.ndim == 2:
        targets = targets[:, : logits.shape[1]]
    loss = F.cross_entropy(logits.float(), targets)
    trainable = [item for item in model.named_parameters() if item[1].requires_grad]
    gradients = torch.autograd.grad(
        loss, [parameter for _, parameter in trainable], materialize_grads=True
    )
    for (name, _), gradient in reversed(list(zip(trainable, gradients, strict=True))):
        if not torch.isfinite(gradient).all():
            return f"gradient of {name}"
    return None
