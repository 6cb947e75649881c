"""Find the feature map that an image classifier without readable attention reads (ResNet, ConvNeXt,
Swin, Hiera), so that a vision transformer can be compared with it. The places of the map take the
role of the patches.

A feature map is the output of a module: [B, C, rows, columns], with its channels last, or tokens
[B, N, C]. It is the last one that all of the classifier's paths to the image lead through,
and whose places, not only its class token, are read.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.explanation.capture.layers import first_output
from vit.explanation.capture.tokens import count_prefix_tokens
from vit.model.logits import compute_logits
from vit.runtime.tensors import Images

FeatureMap = Float[Tensor, "B C rows columns"]
# A place stands for at least this many pixels: an image that is only normalised is no feature map.
_MIN_PIXELS = 8
# Smallest standard deviation, over the places, of the logarithm of how much more a place changes
# with one half of the image than with the other. Where a last stage attends between all places, it
# is below 0.1 with random weights; of most convolutions it is above 2.
_MIN_LOCALITY = 1.0


def order_channels(model: nn.Module, features: Tensor, images: Images) -> FeatureMap | None:
    """Return a feature map with its channels first and without prefix tokens. The two sides with
    the images' proportions are rows and columns. Return None if there are none, or other parts than
    images."""
    if len(features) != len(images):
        return None
    height, width = images.shape[-2:]
    if features.ndim == 4:
        first, second, third = features.shape[1:]
        if second * width == third * height:
            return features
        if first * width == second * height:
            return features.permute(0, 3, 1, 2)
        return None

    for num_prefix in range(count_prefix_tokens(model) + 1):
        num_places = features.shape[1] - num_prefix
        rows = round(math.sqrt(max(num_places, 0) * height / width))
        columns = num_places // max(rows, 1)
        if rows > 0 and rows * columns == num_places and rows * width == columns * height:
            return torch.unflatten(features[:, num_prefix:].mT, 2, (rows, columns))
    return None


@contextmanager
def record_outputs(model: nn.Module, number: int | None = None) -> Iterator[list[Tensor]]:
    """Keep the outputs of modules that have several places, a feature map or tokens, in their
    order; with `number`, that one alone."""
    outputs: list[Tensor] = []
    count = itertools.count()

    def keep(module: nn.Module, args: object, output: Any) -> None:
        if isinstance(output, tuple) and output:
            output = first_output(output)
        if not isinstance(output, Tensor) or output.ndim not in (3, 4):
            return
        # pooled features have one place: two sides of 1, or one token
        has_places = sorted(output.shape[1:])[output.ndim - 3] > 1
        if has_places and number in (None, next(count)):
            outputs.append(output)

    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(module.register_forward_hook(keep))
        yield outputs


@torch.enable_grad()
def find_feature_map(model: nn.Module, image: Float[Tensor, "1 3 height width"]) -> int:
    """Find the feature map that the classifier reads.

    Returns:
        Its number among the outputs that `record_outputs` keeps.

    Raises:
        ValueError: The classifier also reads something else, or the places of its feature map
            aren't on the image where a map of it is drawn.
    """
    name = type(model).__name__
    generator = torch.Generator().manual_seed(0)
    # noise, so that no part of the feature map is zero
    noise = torch.randn(image.shape, generator=generator).to(image)
    image = (image + noise).requires_grad_()
    with record_outputs(model) as outputs:
        logits = compute_logits(model, image)

    # a plain sum of the logits may be constant
    signs = torch.randint(2, logits.shape[1:], generator=generator) * 2 - 1
    score = (logits * signs.to(logits)).sum()
    kept = [number for number, output in enumerate(outputs) if output.requires_grad]
    gradients: tuple[Tensor | None, ...] = ()
    if kept:
        kept_outputs = [outputs[number] for number in kept]
        gradients = torch.autograd.grad(score, kept_outputs, retain_graph=True, allow_unused=True)
    found: list[int] = []  # last first
    is_read = False
    for number, gradient in zip(reversed(kept), reversed(gradients), strict=True):
        if gradient is None:
            continue
        places = order_channels(model, gradient, image)
        # the classifier may read the class token alone
        if places is None or not places.any():
            continue
        if places[0, 0].numel() * _MIN_PIXELS > image[0, 0].numel():
            continue
        is_read = True
        if _reads_nothing_else(logits, outputs[number], image):
            found.append(number)
    if not found and is_read:
        raise ValueError(
            f"the classifier of {name} reads something other than its last feature map (test-time "
            "augmentation, or several encoders?), so a map of it would show a part of the model"
        )
    if not found:
        raise ValueError(
            f"{name} has no feature map [images, channels, rows, columns] that its classifier "
            "reads, with the proportions of the image"
        )
    return _check_places(model, image.detach(), found)


def _reads_nothing_else(logits: Tensor, features: Tensor, image: Images) -> bool:
    """Return whether every path from the logits to the image leads through `features`."""
    seen = {None, features.grad_fn}
    waiting = [logits.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        assert node is not None
        if getattr(node, "variable", None) is image:
            return False
        waiting += [later for later, _ in node.next_functions]
    return True


@torch.no_grad()
def _check_places(
    model: nn.Module, image: Float[Tensor, "1 3 height width"], found: list[int]
) -> int:
    """Change each quarter of the image: the upper places have to change more with the upper half
    than with the lower one.

    Where every place sees nearly the whole image, they change alike. Then the feature map before is
    looked at, because no model turns a feature map. It is also taken instead of tokens, which may
    be channels.

    Raises:
        ValueError: The places lie in another way, or all change alike.
    """
    height, width = (side // 2 for side in image.shape[2:])
    generator = torch.Generator().manual_seed(0)
    changed = image.repeat(5, 1, 1, 1)
    for number, (lower, right) in enumerate(itertools.product((0, 1), repeat=2), start=1):
        quarter = changed[number, :, lower * height :, right * width :][:, :height, :width]
        quarter += torch.randn(quarter.shape, generator=generator).to(quarter)
    with record_outputs(model) as outputs:
        compute_logits(model, changed)

    chosen = None
    for number in found:
        if outputs[number].ndim == 4 and chosen is None:
            chosen = number
        features = order_channels(model, outputs[number], changed)
        assert features is not None
        change = (features[1:] - features[:1]).double().norm(dim=1)  # [4, rows, columns]
        # a place out of reach changes by nothing, or by what rounding leaves
        change = change.clamp_min(max(1e-3 * float(change.max()), 1e-30)).log()
        change = change.unflatten(0, (2, 2))
        to_upper = (change[0] - change[1]).mean(dim=0)
        to_left = (change[:, 0] - change[:, 1]).mean(dim=0)
        rows, columns = to_upper.shape
        # (how much more with this half, the places in it minus the others, at right angles to it)
        sides = []
        if rows > 1:
            sides.append((to_upper, *_compare_halves(to_upper)))
        if columns > 1:
            across, along = _compare_halves(to_left)
            sides.append((to_left, along, across))
        if any(preference.std() < _MIN_LOCALITY for preference, _, _ in sides):
            continue
        if all(
            along > max(across.abs(), preference.std() / 2) for preference, along, across in sides
        ):
            return number if chosen is None else chosen
        raise ValueError(
            f"the last feature map of {type(model).__name__} isn't on the image row by row (is the "
            "image mirrored or turned within the model?), so a map of it would be wrong"
        )
    raise ValueError(
        f"the places of {type(model).__name__}'s feature maps all change alike with any part of "
        "the image, so where they lie is unknown"
    )


def _compare_halves(preference: Float[Tensor, "rows columns"]) -> tuple[Tensor, Tensor]:
    """Return the mean of the upper half minus that of the lower one, and of the left half minus
    that of the right one; a row or column in the middle is in neither."""
    rows, columns = (side // 2 for side in preference.shape)
    down = across = preference.new_zeros(())
    if rows:
        down = preference[:rows].mean() - preference[-rows:].mean()
    if columns:
        across = preference[:, :columns].mean() - preference[:, -columns:].mean()
    return down, across
