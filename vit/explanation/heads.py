"""Which attention heads does a class depend on?

Give each head a gate that multiplies its output, O_h → g_h O_h. With g_h = 0 the head is ablated;
∂f/∂g_h at 1, which is Σ over queries and channels of O_h ∂f/∂O_h, is the loss of the score f
without it, to first order. One backward pass computes it for all heads (Michel, Levy & Neubig 2019,
"Are Sixteen Heads Really Better than One?", eq. 2; their importance of a head is the mean of its
absolute value over images).

It is an estimate: it doesn't include that other heads compensate, nor that norms scale the rest. It
is better for many images than for one, and for models with many heads: the first order says little
about a head that is a large part of the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vit.bundle import Bundle
from vit.data.images import ImageInputs, list_images
from vit.explanation.capture.forward import Forward, run_forward
from vit.explanation.capture.reader import read_bundle
from vit.explanation.items import items_from_images
from vit.explanation.targets import TargetLike, build_target, check_count, find_output_kind
from vit.runtime.device import copy_to_device


@dataclass(frozen=True)
class HeadEffects:
    """The effect of each head on the class of each image, to first order.

    Attributes:
        effects: Loss of the score without the head; negative if the head is evidence against the
            class.
        targets: Class of each image.
        class_names: Names of the classes.
    """

    effects: Float[Tensor, "n L H"]
    targets: Int[Tensor, " n"]
    class_names: Sequence[str]

    def select_class(self, index: int) -> Float[Tensor, "m L H"]:
        """Return the effects for the images of one class."""
        return self.effects[self.targets == index]

    def importance(self, index: int) -> Float[Tensor, "L H"]:
        """Compute the mean size of each head's effect over the images of a class."""
        return self.select_class(index).abs().mean(dim=0)

    def find_most_important(self, index: int, count: int = 5) -> list[tuple[int, int]]:
        """Find the heads that a class depends on most, as (layer, head) from 0, first to last."""
        importance = self.importance(index)
        # stable, so that equal heads have the same order on every machine
        order = importance.flatten().argsort(descending=True, stable=True)[:count].tolist()
        return [divmod(place, importance.shape[1]) for place in order]

    @property
    def table(self) -> str:
        """The five most important heads of each class with their mean effects, in Markdown."""
        lines = ["| class | images | heads (loss of the score without each) |"]
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
    """Compute ∂score/∂g of each head at g = 1, see the module's docstring.

    Args:
        forward: A forward pass with gradients.
        score: Score of each image, in its graph.
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
    """Measure the effect of each attention head on the class of each image, in one backward pass.

    Args:
        bundle: The model, with its class names and preprocessing.
        images: Paths, folders, PIL images, uint8 arrays [H, W, 3], or one of them.
        target: "auto" (the predicted class, or the most probable label), or one class by its name
            or index.
        batch_size: Images at a time.

    Returns:
        The effects [images, layers, heads] on the logit; `.table` has the heads that each class
        depends on.

    Raises:
        ValueError: The model's attention can't be read, the class is unknown, or an image can't be
            read.

    Example:
        >>> effects = measure_heads(vit.load_bundle("runs/digits"), "photos")
        >>> print(effects.table)
    """
    reader = read_bundle(bundle)
    kind = find_output_kind(bundle.model, bundle.class_names, is_multilabel=bundle.is_multilabel)
    explained = build_target(target, bundle.class_names, kind)
    items = items_from_images(list_images(images))
    check_count(target, len(items))
    effects = []
    targets = []
    for start in range(0, len(items), batch_size):
        pixels = np.stack(
            [
                bundle.preprocess.to_uint8(item.read()[0])
                for item in items[start : start + batch_size]
            ]
        )
        batch = copy_to_device(torch.from_numpy(pixels), bundle.device)
        batch = bundle.preprocess.normalize(batch)
        # one verified batch is enough
        forward = run_forward(reader, batch, gradients=True, verify=start == 0)
        # an effect is the loss of one score, so each image has one class
        explained_here = explained.select(range(start, start + len(batch)))
        classes = explained_here.choose(forward.logits.detach())[:, 0]
        score = explained.score(forward.logits, classes)
        # on the host, so that the device holds the graph of one batch
        effects.append(compute_head_effects(forward, score).cpu())
        targets.append(classes.cpu())
    return HeadEffects(torch.cat(effects), torch.cat(targets), bundle.class_names)
