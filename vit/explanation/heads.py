"""Which attention heads does a class depend on?

Give each head a gate that multiplies what it writes, O_h → g_h O_h. With g_h = 0 the head is
ablated; ∂f/∂g_h at 1, which is Σ over queries and channels of O_h ∂f/∂O_h, is what the score f
would lose without it, to first order. One backward pass gives it for all heads (Michel, Levy &
Neubig 2019, "Are Sixteen Heads Really Better than One?", eq. 2, whose importance of a head is the
mean of its absolute value over images).

It is an estimate: heads that make up for one another, and norms that scale what is left, are not
in it. It is better of many images than of one, and of models of many heads: where a head is a large
part of the whole, the first order says little.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vit.bundle import Bundle
from vit.data.listing import ImageInputs, list_images
from vit.explanation.capture.forward import Forward, run_forward
from vit.explanation.items import items_from_images
from vit.explanation.targets import build_target, find_output_kind
from vit.options import TargetLike
from vit.runtime.device import copy_to_device


@dataclass(frozen=True)
class HeadEffects:
    """What each head does for the class of each image, to first order.

    Args:
        effects: what the score would lose without the head; below zero where the head speaks
            against the class.
        targets: the class of each image.
        class_names: of the model.
    """

    effects: Float[Tensor, "n L H"]
    targets: Int[Tensor, " n"]
    class_names: Sequence[str]

    def select_class(self, index: int) -> Float[Tensor, "m L H"]:
        """The effects of the images of one class."""
        return self.effects[self.targets == index]

    def importance(self, index: int) -> Float[Tensor, "L H"]:
        """The mean size of each head's effect over the images of a class."""
        return self.select_class(index).abs().mean(dim=0)

    def find_most_important(self, index: int, count: int = 5) -> list[tuple[int, int]]:
        """(layer, head), from 0, of the heads that a class depends on most, first to last."""
        importance = self.importance(index)
        order = importance.flatten().argsort(descending=True, stable=True)[:count].tolist()
        return [divmod(place, importance.shape[1]) for place in order]

    @property
    def table(self) -> str:
        """Markdown: the five most important heads of each class, with the mean of their effects."""
        lines = ["| class | images | heads, with what its score loses without each |"]
        lines.append("| --- | --- | --- |")
        for index in sorted(set(self.targets.tolist())):
            effects = self.select_class(index)
            heads = [
                f"layer {layer} head {head} ({effects[:, layer, head].mean():+.2f})"
                for layer, head in self.find_most_important(index)
            ]
            lines.append(f"| {self.class_names[index]} | {len(effects)} | {', '.join(heads)} |")
        return "\n".join(lines)


def compute_head_effects(forward: Forward, score: Float[Tensor, " B"]) -> Float[Tensor, "B L H"]:
    """∂score/∂g of each head at g = 1, see above.

    Args:
        forward: a forward pass with gradients.
        score: of each image, in its graph.
    """
    effects = []
    for layer, heads_gradient in forward.record.differentiate(score):
        gradient, _ = layer.gradient_and_value(heads_gradient, slice(None))  # [B, H, N, K]
        effects.append((layer.head_outputs() * gradient).sum(dim=(2, 3)))
    return torch.stack(effects, dim=1)


@torch.inference_mode(False)
def measure_heads(
    bundle: Bundle,
    images: ImageInputs,
    *,
    target: TargetLike = "auto",
    batch_size: int = 16,
) -> HeadEffects:
    """Measure what each attention head does for the class of each image, in one backward pass.

    Args:
        bundle: the model, with its class names and preprocessing.
        images: paths, folders, PIL images, uint8 arrays [H, W, 3], or one of them.
        target: "auto" (the predicted class), or one class by its name or index.
        batch_size: images at a time.

    Returns:
        The effects [images, layers, heads] on the logit; `.table` has the heads that each class
        depends on.

    Raises:
        ValueError: for a model whose attention can't be read, an unknown class and what is not an
            image.

    Example:
        >>> effects = measure_heads(vit.load_bundle("runs/digits"), "photos")
        >>> print(effects.table)
    """
    device = next(bundle.model.parameters()).device
    kind = find_output_kind(bundle.model, bundle.class_names)
    score_of, choose_targets = build_target(target, bundle.class_names, kind)
    items = items_from_images(list_images(images))
    effects = []
    targets = []
    for start in range(0, len(items), batch_size):
        pixels = np.stack(
            [
                bundle.preprocess.to_uint8(item.read()[0])
                for item in items[start : start + batch_size]
            ]
        )
        batch = copy_to_device(torch.from_numpy(pixels), device)
        batch = bundle.preprocess.normalize(batch)
        # whether the attention is understood is the same of every batch
        forward = run_forward(bundle.model, batch, gradients=True, verify=start == 0)
        classes = choose_targets(forward.logits.detach())[:, 0]
        score = score_of.score(forward.logits, classes)
        effects.append(compute_head_effects(forward, score).cpu())
        targets.append(classes.cpu())
    return HeadEffects(torch.cat(effects), torch.cat(targets), bundle.class_names)
