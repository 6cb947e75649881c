"""Batched operations give what torchvision gives for each image alone with the same parameters."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torchvision.transforms import functional as reference

from vit.data.image_ops import jitter_colors, resized_crop


def pictures(count: int = 6, height: int = 20, width: int = 28) -> Tensor:
    """uint8 [B, 3, H, W] of smooth random colours: neighbouring pixels are alike, as in
    photographs."""
    coarse = torch.randint(0, 256, (count, 3, 5, 7), generator=torch.Generator().manual_seed(1))
    smooth = torch.nn.functional.interpolate(coarse.float(), (height, width), mode="bicubic")
    return smooth.round().clamp(0, 255).to(torch.uint8)


def each(
    operation: Callable[[Tensor, float], Tensor], images: Tensor, parameters: Tensor
) -> Tensor:
    pairs = zip(images, parameters.tolist(), strict=True)
    return torch.stack([operation(image, parameter) for image, parameter in pairs])


FACTORS = torch.tensor([0.0, 0.3, 0.8, 1.0, 1.4, 1.9])


@pytest.mark.parametrize(
    ("place", "theirs"),
    [
        (0, reference.adjust_brightness),
        (1, reference.adjust_contrast),
        (2, reference.adjust_saturation),
    ],
    ids=["brightness", "contrast", "saturation"],
)
def test_colour_operations_equal_torchvisions_within_a_level(
    place: int, theirs: Callable[[Tensor, float], Tensor]
) -> None:
    images, factors = pictures(), torch.ones(3, 6)
    factors[place] = FACTORS
    expected = each(theirs, images, FACTORS).float()
    # torchvision cuts fractions off at every step, we keep them
    assert (jitter_colors(images.float(), factors) - expected).abs().max() <= 2


@pytest.mark.parametrize("size", [(8, 8), (20, 28), (31, 17)])
def test_resized_crop_equals_torchvisions_antialiased_bilinear(size: tuple[int, int]) -> None:
    images = pictures()
    boxes = torch.tensor(
        [
            [0, 0, 28, 20],
            [3, 5, 12, 18],
            [27, 19, 28, 20],
            [0, 10, 28, 20],
            [5, 0, 8, 20],
            [1, 1, 3, 4],
        ]
    )
    expected = torch.stack(
        [
            reference.resized_crop(
                image.float(), top, left, bottom - top, right - left, list(size), antialias=True
            )
            for image, (left, top, right, bottom) in zip(images, boxes.tolist(), strict=True)
        ]
    )
    got = resized_crop(images.permute(0, 2, 3, 1).contiguous(), boxes.float(), size)
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=0)
