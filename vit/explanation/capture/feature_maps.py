"""Find the feature map that an image classifier without readable attention reads (ResNet, ConvNeXt,
Swin, Hiera), so that a vision transformer can be compared with it. The places of the map take the
role of the patches.

A feature map is the output of a module: [B, C, rows, columns], with its channels last, or tokens
[B, N, C]. It is the last one that all of the classifier's paths to the image lead through,
and whose places, not only its class token, are read.
"""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.explanation.capture.tokens import count_prefix_tokens, draw_noise, tile_squares
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
        squares = tile_squares(features.shape[1] - num_prefix, images)
        if squares is not None:
            return torch.unflatten(features[:, num_prefix:].mT, 2, squares)
    return None


@contextmanager
def record_outputs(model: nn.Module, number: int | None = None) -> Iterator[list[Tensor]]:
    """Keep the outputs of modules that have several places, a feature map or tokens, in their
    order; with `number`, that one alone."""
    outputs: list[Tensor] = []
    count = itertools.count()

    def keep(module: nn.Module, args: object, output: Any) -> None:
        if isinstance(output, tuple) and output:
            output = output[0]
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
def find_feature_map(model: nn.Module, image: Float[Tensor, "1 channels height width"]) -> int:
    """Find the feature map that the classifier reads.

    Returns:
        Its number among the outputs that `record_outputs` keeps.

    Raises:
        ValueError: The classifier also reads something else, or the places of its feature map
            aren't on the image where a map of it is drawn.
    """
    generator = torch.Generator().manual_seed(0)
    # noise, so that no part of the feature map is zero
    image = (image + draw_noise(image.shape, image, generator)).requires_grad_()
    with record_outputs(model) as outputs:
        logits = compute_logits(model, image)

    # a plain sum of the logits may be constant
    signs = torch.randint(2, logits.shape[1:], generator=generator) * 2 - 1
    kept = [number for number, output in enumerate(outputs) if output.requires_grad]
    gradients = torch.autograd.grad(
        (logits * signs.to(logits)).sum(),
        [*(outputs[number] for number in kept), image],
        retain_graph=True,
        allow_unused=True,
    )
    found: list[int] = []  # last first
    for number, gradient in reversed(list(zip(kept, gradients, strict=False))):
        places = None if gradient is None else order_channels(model, gradient, image)
        # the classifier may read the class token alone
        if places is None or not places.any():
            continue
        is_coarse = places[0, 0].numel() * _MIN_PIXELS <= image[0, 0].numel()
        if is_coarse and _reads_nothing_else(logits, outputs[number], image):
            found.append(number)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no feature map with the proportions of the image, or its "
            "classifier reads something other than its last feature map (several encoders?)"
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
    model: nn.Module, image: Float[Tensor, "1 channels height width"], found: list[int]
) -> int:
    """Change each quarter of the image: the upper places have to change more with the upper half
    than with the lower one.

    Where every place sees nearly the whole image, they change alike. Then the feature map before is
    looked at, because no model turns a feature map. It is also taken instead of tokens, which may
    be channels.
    """
    height, width = (side // 2 for side in image.shape[2:])
    generator = torch.Generator().manual_seed(0)
    changed = image.repeat(5, 1, 1, 1)
    for number, (lower, right) in enumerate(itertools.product((0, 1), repeat=2), start=1):
        quarter = changed[number, :, lower * height :, right * width :][:, :height, :width]
        quarter += draw_noise(quarter.shape, quarter, generator)
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
        # how much more with the upper half, and, turned, with the left half
        halves = [(change[0] - change[1]).mean(dim=0), (change[:, 0] - change[:, 1]).mean(dim=0).mT]
        halves = [half for half in halves if len(half) > 1]
        if any(half.std() < _MIN_LOCALITY for half in halves):
            continue
        if all(
            _compare_halves(half) > max(_compare_halves(half.mT).abs(), half.std() / 2)
            for half in halves
        ):
            return number if chosen is None else chosen
        break
    raise ValueError(
        f"the places of the last feature maps of {type(model).__name__} change alike with any part "
        "of the image, or aren't on it row by row (is the image mirrored or turned within the "
        "model?), so where they lie is unknown"
    )


def _compare_halves(change: Float[Tensor, "rows columns"]) -> Tensor:
    """Return the mean of the upper half minus that of the lower one; a row in the middle is in
    neither."""
    half = len(change) // 2
    return change[:half].mean() - change[-half:].mean() if half else change.new_zeros(())
