"""Maps lie on the pixels they came from, and pictures survive odd values."""

import numpy as np
import pytest
from PIL import Image

from vit.data.preprocess import Geometry, Preprocess
from vit.explanation.render.overlay import blend, shade

WHOLE = Geometry(original_size=(60, 60), box=(0, 0, 60, 60))


@pytest.mark.parametrize("size", [(300, 200), (200, 300), (224, 224), (97, 411)])
@pytest.mark.parametrize("crop_pct", [1.0, 0.875])
def test_a_planted_patch_lands_on_the_pixels_the_model_saw(
    size: tuple[int, int], crop_pct: float
) -> None:
    """A white square in the photo where the map's patch is drawn is that patch of the model's
    input, to within a pixel of the photo."""
    preprocess = Preprocess(image_size=(64, 96), crop_pct=crop_pct)
    values = np.zeros((8, 12), dtype=np.float32)
    values[3, 10] = 1
    geometry = preprocess.geometry(size)
    drawn = blend(Image.new("RGB", size, (128,) * 3), values, geometry, signed=False)
    change = np.asarray(drawn).astype(float).max(axis=2) - 128  # the highest colour is yellow
    places = np.argwhere(change > 0.5 * change.max())
    pixel = (geometry.box[2] - geometry.box[0]) / 96
    low, high = np.round(places.mean(axis=0) + 0.5 + [[-4 * pixel], [4 * pixel]]).astype(int)
    photo = np.zeros((size[1], size[0], 3), dtype=np.uint8)
    photo[low[0] : high[0], low[1] : high[1]] = 255
    seen = preprocess.to_uint8(Image.fromarray(photo))[..., 0].astype(float)
    centre = np.array([(seen * axis).sum() / seen.sum() for axis in np.indices(seen.shape)])
    assert np.abs(centre - [27.5, 83.5]).max() * pixel <= 1


def test_the_photo_is_dark_where_the_model_did_not_look() -> None:
    geometry = Geometry(original_size=(60, 60), box=(-10, 20, 30, 70))
    values = np.eye(4, dtype=np.float32)
    drawn = np.asarray(blend(Image.new("RGB", (60, 60), "white"), values, geometry, signed=False))
    is_dark = (drawn == 127).all(axis=2)
    assert is_dark[:20].all()
    assert is_dark[:, 30:].all()
    assert not is_dark[20:, :30].any()


def test_signed_maps_have_zero_in_the_middle_and_red_above() -> None:
    heat, strength = shade(np.array([[-1.0, 0.0, 3.0, -3.0]]), (4, 1), signed=True)
    colours = np.asarray(heat)[0].astype(int)
    assert colours[0][2] > colours[0][0]  # blue
    assert colours[2][0] > colours[2][2]  # red
    assert colours[1].min() > 180  # pale
    assert strength[0, 1] == 0
    assert strength[0, 2] == strength[0, 3] == 1


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("size", [(32, 32), (1000, 20), (20, 1000), (900, 600), (1, 1)])
def test_pictures_of_any_size_are_drawn(size: tuple[int, int], signed: bool) -> None:
    """A map of zeros, too."""
    geometry = Preprocess(image_size=(16, 16)).geometry(size)
    for values in (np.random.default_rng(0).random((4, 4)), np.zeros((4, 4))):
        drawn = blend(Image.new("RGB", size, "green"), values, geometry, signed=signed)
        assert drawn.size == size


def test_a_nearly_even_map_is_drawn_flat() -> None:
    """Its differences of some percent would otherwise fill the range of the colours."""
    noise = np.random.default_rng(0).random((4, 4), dtype=np.float32)
    for factor in (0.1, 1.0):
        values = 1 + factor * noise
        drawn = np.asarray(blend(Image.new("RGB", (60, 60), "gray"), values, WHOLE, signed=False))
        count = len(np.unique(drawn.reshape(-1, 3), axis=0))
        assert count == 1 if factor == 0.1 else count >= 100


@pytest.mark.parametrize("photo", [(0, 0, 0), (255, 255, 255), (200, 0, 0)])
def test_a_map_is_seen_on_dark_white_and_red_photos(photo: tuple[int, int, int]) -> None:
    """The strongest patch differs from the photo by far more than can just be seen, also for
    someone who doesn't tell red from green (only yellow to blue and brightness are compared)."""
    picture = Image.new("RGB", (60, 60), photo)
    values = np.zeros((4, 4), dtype=np.float32)
    values[1, 1], values[2, 2] = 8, -8
    for signed in (False, True):
        shown = values if signed else np.abs(values)
        lab = np.asarray(blend(picture, shown, WHOLE, signed=signed).convert("LAB")).astype(float)
        lab[..., 2] = (lab[..., 2] + 128) % 256  # Pillow stores signed numbers
        ground = lab[7, 52, [0, 2]]
        for at in ((22, 22), (37, 37)):
            assert np.abs(lab[at][[0, 2]] - ground).max() > 25
