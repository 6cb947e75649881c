"""Read the last feature map of a convolutional network, for Grad-CAM: the last output of a module
that has several positions, if its sides have the proportions of the image.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.explanation.capture.discovery import draw_noise, hook_modules
from vit.explanation.capture.watch import find_tolerance
from vit.model.logits import compute_logits
from vit.runtime.tensors import Images


def order_channels(features: Tensor, images: Images) -> Float[Tensor, "B C rows columns"] | None:
    """Return a feature map, whose channels may be last, with its channels first. Return None if no
    two sides have the images' proportions."""
    height, width = images.shape[-2:]
    if features.ndim != 4 or len(features) != len(images):
        return None
    first, second, third = features.shape[1:]
    if second * width == third * height:
        return features
    if first * width == second * height:
        return features.permute(0, 3, 1, 2)
    return None


@contextmanager
def record_outputs(
    model: nn.Module, held: tuple[int, Tensor] | None = None
) -> Iterator[list[tuple[int, Tensor]]]:
    """Keep the last output of a module that has several positions, with its number among such
    outputs. The model goes on with a `held` tensor instead of the output of its number."""
    last: list[tuple[int, Tensor]] = []
    count = itertools.count()

    def keep(module: nn.Module, args: object, output: Any) -> Tensor | None:
        if not isinstance(output, Tensor) or output.ndim not in (3, 4):
            return None
        # pooled features have one position: two sides of 1, or one token
        if sorted(output.shape[1:])[output.ndim - 3] == 1:
            return None
        last[:] = [(next(count), output)]
        return held[1] if held is not None and held[0] == last[0][0] else None

    with hook_modules(model, keep):
        yield last


@torch.no_grad()
def check_feature_map(model: nn.Module, image: Float[Tensor, "1 channels height width"]) -> None:
    """Change each half of an image: the other half of the map mustn't change more, and the
    classifier must read nothing else. Positions that see the whole image change alike. Raise
    ValueError if the last output with several positions isn't such a feature map."""
    height, width = (side // 2 for side in image.shape[2:])
    generator = torch.Generator().manual_seed(0)
    # noise, so that no part of the feature map is zero
    images = (image + draw_noise(image.shape, image, generator)).repeat(5, 1, 1, 1)
    halves = (images[1, :, :height], images[2, :, -height:])
    for half in (*halves, images[3, :, :, :width], images[4, :, :, -width:]):
        half += draw_noise(half.shape, half, generator)
    with record_outputs(model) as outputs:
        logits = compute_logits(model, images)
    ordered = order_channels(outputs[0][1], images) if outputs else None
    is_read = False
    if ordered is not None:
        number, features = outputs[0]
        with record_outputs(model, (number, features[:1].expand_as(features))):
            error = (compute_logits(model, images) - logits[:1]).abs().max()
        is_read = bool(error <= find_tolerance(image) * logits.abs().max())
        change = (ordered[1:] - ordered[:1]).double().norm(dim=1)  # [4, rows, columns]
        # a position out of reach changes by nothing, or by what rounding leaves
        change = change.clamp_min(max(1e-3 * float(change.max()), 1e-30)).log()
        for more in (change[0] - change[1], (change[2] - change[3]).mT):
            along, across = _compare_halves(more), _compare_halves(more.mT)
            is_read &= max(-along, abs(across)) <= max(along, 1)
    if not is_read:
        raise ValueError(
            f"the classifier of {type(model).__name__} doesn't read one feature map alone whose "
            "places lie on the image (tokens, several maps, an image that is turned?)"
        )


def _compare_halves(change: Float[Tensor, "rows columns"]) -> float:
    """Return the mean of the upper half minus that of the lower one, without a row in the
    middle."""
    half = len(change) // 2
    if half == 0:
        return 0.0
    return float(change[:half].mean() - change[-half:].mean())
