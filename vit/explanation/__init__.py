"""Attention maps: which parts of an image a vision transformer's answer came from.

`explain_images(bundle, images, method="rollout")` is the short way; `capture`, `rollout` and `methods` are
the parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from vit.explanation.methods.rollout import attention_rollout
from vit.explanation.methods.table import METHODS, Explainable, MapOptions, compute_maps
from vit.explanation.methods.targets import build_target_chooser

__all__ = ["METHODS", "Explainable", "Explanation", "MapOptions", "attention_rollout", "explain_images"]


@dataclass
class Explanation:
    """Maps of a batch on the patch grid, and what the model answered."""

    method: str
    maps: Float[Tensor, "B rows columns"]
    targets: Int[Tensor, " B"]  # the class each map is about; for a method that knows no class, the predicted
    probabilities: Float[Tensor, "B C"]
    prefix_mass: Float[Tensor, " B"]  # share of the relevance in class, distillation and register tokens
    entropy: Float[Tensor, " B"]  # nats, 0 to log(patches)


def explain_images(
    bundle: Explainable,
    images: Sequence[Image.Image],
    method: str = "rollout",
    *,
    target: int | str = "auto",
    options: MapOptions | None = None,
    batch_size: int = 32,
) -> Explanation:
    """Explain RGB images with one method, `batch_size` of them at a time.

    `target`: "auto" (the predicted class), a class's name or its index.
    """
    if not images:
        raise ValueError("there are no images to explain")
    choose_targets = build_target_chooser(target, bundle.class_names)
    device = next(bundle.model.parameters()).device
    parts = []
    for start in range(0, len(images), batch_size):
        batch = bundle.preprocess(list(images[start : start + batch_size])).to(device)
        logits, targets, (maps,) = compute_maps(
            bundle.model, batch, methods=[method], choose_targets=choose_targets, options=options
        )
        temperature = getattr(bundle, "temperature", 1.0)
        probabilities = (logits.float() / temperature).softmax(dim=1)
        parts.append((maps.values, targets, probabilities, maps.prefix_mass, maps.entropy))
    values, targets, probabilities, prefix_mass, entropy = (
        torch.cat(of_parts) for of_parts in zip(*parts, strict=True)
    )
    return Explanation(method, values[:, 0], targets[:, 0], probabilities, prefix_mass[:, 0], entropy[:, 0])
