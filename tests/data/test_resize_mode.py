"""The part of an image that the model sees, also in an input of another shape."""

import numpy as np
import pytest
import torch
from PIL import Image

from vit.data.augment import CROP_ASPECTS, Augmentation
from vit.data.preprocess import Preprocess, ResizeMode
from vit.data.random import StatelessRandom

SIZES = [(64, 48), (48, 64), (300, 40), (40, 301), (33, 97), (20, 20), (40, 200)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["crop", "stretch"])
def test_every_place_of_the_image_is_where_geometry_says(
    size: tuple[int, int], mode: ResizeMode
) -> None:
    """A ramp along x and y tells for each input pixel which place of the original it shows."""
    width, height = size
    preprocess = Preprocess((32, 40), crop_pct=0.8, interpolation="bilinear", resize_mode=mode)
    left, top, right, bottom = preprocess.geometry(size).box
    x_ramp = np.broadcast_to((np.arange(width) + 0.5) / width * 255, (height, width))
    y_ramp = np.broadcast_to(((np.arange(height) + 0.5) / height * 255)[:, None], (height, width))
    picture = np.stack([x_ramp, y_ramp, 0 * x_ramp], -1).round().astype(np.uint8)
    got = preprocess.to_uint8(Image.fromarray(picture)).astype(float)
    assert got.shape == (32, 40, 3)
    x_claimed = left + (np.arange(40) + 0.5) * (right - left) / 40
    y_claimed = top + (np.arange(32) + 0.5) * (bottom - top) / 32
    if mode == "stretch":
        assert (left, top, right, bottom) == (0, 0, width, height)
    for shown, claimed, side in (
        (got[16, :, 0], x_claimed, width),
        (got[:, 20, 1], y_claimed, height),
    ):
        # at the rim the filter leans inwards
        places = shown[2:-2] / 255 * side
        np.testing.assert_allclose(places, claimed[2:-2], atol=0.006 * side + 0.02)


def test_random_crops_have_the_shape_of_the_input() -> None:
    """Otherwise an input of 5:1 would show crops of 1:1 stretched five times."""
    rng = StatelessRandom(0, 0, torch.arange(2000))
    crop = Augmentation(resized_crop_scale=(0.1, 0.2))
    places = crop.sample_places(rng).numpy()
    left, top, right, bottom = crop.place_crops(places, (40, 200), shape=5).T
    aspects = (right - left) / (bottom - top)
    assert 5 * CROP_ASPECTS[0] * 0.9 < aspects.min()
    assert aspects.max() < 5 * CROP_ASPECTS[1] * 1.1
    # a long image of a square input isn't distorted either
    large = Augmentation(resized_crop_scale=(0.5, 1.0))
    left, top, right, bottom = large.place_crops(places, (40, 200), shape=1).T
    aspects = (right - left) / (bottom - top)
    assert 0.9 * CROP_ASPECTS[0] < aspects.min()
    assert aspects.max() < 1.1 * CROP_ASPECTS[1]
    # of a square one they are what they were
    assert crop.place_crops(places[:, :3], (40, 40), shape=1).tolist() == FIRST_BOXES


FIRST_BOXES = [[19, 17, 35, 32], [4, 5, 19, 22], [5, 14, 19, 27]]
