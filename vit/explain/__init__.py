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

from vit.explain.methods import METHODS, Explainable, MapOptions, compute_maps
from vit.explain.rollout import attention_rollout

__all__ = ["METHODS", "Explainable", "Explanation", "MapOptions", "attention_rollout", "explain_images"]


@dataclass
class Explanation:
    """Maps of a batch on the patch grid, and what the model answered."""

    method: str
    maps: Float[Tensor, "B rows columns"]
    targets: Int[
        Tensor, " B"
    ]  # the class each map is about (the predicted one, also for class-agnostic methods)
    probabilities: Float[Tensor, "B C"]
    prefix_mass: Float[
        Tensor, " B"
    ]  # share of the relevance in class, distillation and register tokens, 0 to 1
    entropy: Float[Tensor, " B"]  # nats, 0 to log(patches)


def explain_images(
    bundle: Explainable,
    images: Sequence[Image.Image],
    method: str = "rollout",
    *,
    target: int | str = "auto",
    options: MapOptions | None = None,
) -> Explanation:
    """Explain RGB images with one method. `target`: "auto" (the predicted class), a class index or a class
    name."""
    target_index = None if target == "auto" else find_class(bundle.class_names, target)

    def choose_targets(logits: Tensor) -> Tensor:
        if target_index is None:
            return logits.argmax(dim=1, keepdim=True)
        return torch.full((len(logits), 1), target_index, device=logits.device)

    device = next(bundle.model.parameters()).device
    batch = bundle.preprocess(list(images)).to(device)
    logits, targets, (maps,) = compute_maps(
        bundle.model, batch, methods=[method], choose_targets=choose_targets, options=options
    )
    return Explanation(
        method=method,
        maps=maps.values[:, 0],
        targets=targets[:, 0],
        probabilities=logits.softmax(dim=1),
        prefix_mass=maps.prefix_mass[:, 0],
        entropy=maps.entropy[:, 0],
    )


def find_class(class_names: Sequence[str], target: int | str) -> int:
    """The index of a class given by index or name."""
    if isinstance(target, str) and target in class_names:
        return list(class_names).index(target)
    if str(target).isdigit() and int(target) < len(class_names):
        return int(target)
    raise ValueError(
        f"unknown class {target!r}; known: 0 to {len(class_names) - 1} or {', '.join(class_names[:20])}"
    )
