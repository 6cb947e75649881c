"""Attention maps: which parts of an image a vision transformer's answer came from.

`explain_images(bundle, images, method="rollout")` is the short way; `capture`, `rollout` and `methods` are
the parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from vit.explain.methods import METHODS, Explainable, MapOptions, compute_maps
from vit.explain.rollout import attention_rollout
from vit.explain.targets import build_target_chooser

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
    choose_targets = build_target_chooser(target, bundle.class_names)
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
