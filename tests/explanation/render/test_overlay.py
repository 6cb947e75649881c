"""Maps lie on the pixels they came from, and pictures survive odd values."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vit
from vit.data.preprocess import Geometry, Preprocess
from vit.explanation.render.overlay import (
    blend,
    draw_overlay,
    fit_scale,
    palette,
    place_map,
    relative_to_uniform,
    shade,
)


@pytest.mark.parametrize("size", [(300, 200), (200, 300), (224, 224), (97, 411)])
@pytest.mark.parametrize("crop_pct", [1.0, 0.875])
def test_a_planted_patch_lands_on_the_pixels_the_model_saw(
    size: tuple[int, int], crop_pct: float
) -> None:
    """A white square in the photo that fills one patch of the model's input, found again to within
    a pixel."""
    preprocess = Preprocess(image_size=(64, 96), crop_pct=crop_pct)
    grid, patch = (8, 12), (3, 10)
    values = np.zeros(grid, dtype=np.float32)
    values[patch] = 1
    geometry = preprocess.geometry(size)
    placed, coverage = place_map(values, geometry, size=size)
    # half of the highest value is interpolated at the patch's edges
    placed /= placed.max()
    down = np.flatnonzero(placed.max(axis=1) >= 0.5)
    across = np.flatnonzero(placed.max(axis=0) >= 0.5)
    photo = np.zeros((size[1], size[0], 3), dtype=np.uint8)
    photo[down[0] : down[-1] + 1, across[0] : across[-1] + 1] = 255
    seen = preprocess.to_uint8(Image.fromarray(photo))[..., 0].astype(float) / 255
    expected = np.zeros((64, 96))
    expected[24:32, 80:88] = 1
    # the square's edges, in pixels of the photo: its area in the model's input is that of one patch
    pixel = (geometry.box[2] - geometry.box[0]) / 96
    for axis, length in ((0, 8), (1, 8)):
        assert abs(seen.sum(axis=1 - axis).max() * pixel - length * pixel) <= 1 + pixel
    centre = np.array([(seen * axis).sum() / seen.sum() for axis in np.indices(seen.shape)])
    assert np.abs(centre - [27.5, 83.5]).max() * pixel <= 1
    assert coverage.sum() > 0


@pytest.mark.parametrize("signed", [False, True])
def test_a_constant_map_draws_without_warning(signed: bool) -> None:
    values = np.zeros((4, 4), dtype=np.float32)
    heat, strength = shade(values, fit_scale(values, signed=signed))
    assert len(np.unique(np.asarray(heat).reshape(-1, 3), axis=0)) == 1
    assert strength.max() < 0.4


def test_signed_maps_have_zero_in_the_middle_and_red_above() -> None:
    values = np.array([[-1.0, 0.0, 3.0, -3.0]])
    scale = fit_scale(values, signed=True)
    assert (scale.low, scale.high) == (-3.0, 3.0)
    heat, strength = shade(values, scale)
    colours = np.asarray(heat)[0].astype(int)
    assert colours[0][2] > colours[0][0]  # blue
    assert colours[2][0] > colours[2][2]  # red
    assert colours[1].min() > 180  # pale
    assert strength[0, 1] == 0
    assert strength[0, 2] == strength[0, 3] == 1


@pytest.mark.parametrize("size", [(32, 32), (1000, 20), (20, 1000), (3000, 2000), (1, 1)])
def test_pictures_of_any_size_are_drawn(size: tuple[int, int]) -> None:
    geometry = Preprocess(image_size=(16, 16)).geometry(size)
    values = np.random.default_rng(0).random((4, 4), dtype=np.float32)
    picture = draw_overlay(Image.new("RGB", size, "green"), values, geometry, signed=False)
    assert max(picture.size) <= 2 * 512 + 8


def test_the_photo_can_be_read_below_any_map() -> None:
    """Where nothing is relevant its brightness is kept, and less of it the higher the value."""
    photo = np.random.default_rng(0).integers(0, 256, (60, 60, 3), dtype=np.uint8)
    geometry = Geometry(original_size=(60, 60), box=(0, 0, 60, 60))
    before = np.asarray(Image.fromarray(photo).convert("L")).astype(float).ravel()
    slopes = []
    # a row each of 0, 2 and 4
    values = np.repeat(np.array([[0], [2], [4]], dtype=np.float32), 3, axis=1)
    drawn = blend(Image.fromarray(photo), values, geometry, signed=False)
    after = np.asarray(drawn.convert("L")).astype(float)
    before = before.reshape(60, 60)
    for rows in (slice(0, 10), slice(29, 31), slice(50, 60)):
        slopes.append(np.polyfit(before[rows].ravel(), after[rows].ravel(), 1)[0])
    # at half of the highest value 1 - 0.8 · 0.5^0.7
    assert slopes == pytest.approx([1, 0.51, 0.2], abs=0.03)


def test_a_nearly_even_map_is_drawn_flat() -> None:
    """Its differences of some percent would otherwise fill the range of the colours."""
    geometry = Geometry(original_size=(40, 40), box=(0, 0, 40, 40))
    photo = Image.new("RGB", (40, 40), "gray")
    noise = np.random.default_rng(0).random((4, 4), dtype=np.float32)
    for factor, colours in ((0.1, 1), (1.0, 100)):
        values = relative_to_uniform(1 + factor * noise)
        scale = fit_scale(values, signed=False)
        assert scale.is_flat == (factor == 0.1)
        drawn = np.asarray(blend(photo, values, geometry, signed=False)).reshape(-1, 3)
        assert len(np.unique(drawn, axis=0)) >= colours
        assert (len(np.unique(drawn, axis=0)) == 1) == scale.is_flat


@pytest.mark.parametrize("preprocess", [None, Preprocess(image_size=(16, 16))])
def test_a_saved_overlay_has_the_map_on_what_the_model_saw(
    preprocess: Preprocess | None, tmp_path: Path
) -> None:
    """Without `preprocess` the map lies on the whole image."""
    values = torch.tensor([[-1.0, 0.5], [0.0, 3.0]])
    photo = Image.new("RGB", (60, 40), "white")
    vit.save_overlay(tmp_path / "map.png", photo, values, preprocess=preprocess, caption="gae")
    with Image.open(tmp_path / "map.png") as picture:
        column = np.asarray(picture.convert("RGB")).astype(int)[40:200, -25].mean(axis=0)
    # outside of the crop, the photo is grey and dark
    assert (np.ptp(column) < 2) == (preprocess is not None)


def test_whoever_saves_an_overlay_says_where_the_model_looked(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="preprocess"):
        vit.save_overlay(tmp_path / "map.png", Image.new("RGB", (60, 40)), np.ones((4, 4)))


def test_palettes_are_matplotlibs() -> None:
    """The file of colours is read without importing matplotlib."""
    from matplotlib import colormaps

    for name, signed in (("inferno", False), ("RdYlBu_r", True)):
        expected = (colormaps[name](np.arange(256))[:, :3] * 255).round()
        assert np.array_equal(palette(signed=signed), expected)


@pytest.mark.parametrize("photo", [(0, 0, 0), (255, 255, 255), (200, 0, 0)])
def test_a_map_is_seen_on_dark_white_and_red_photos(photo: tuple[int, int, int]) -> None:
    """The strongest patch differs from the photo by far more than can just be seen, also for
    someone who doesn't tell red from green (only yellow to blue and brightness are compared)."""
    geometry = Geometry(original_size=(200, 200), box=(0, 0, 200, 200))
    picture = Image.new("RGB", (200, 200), photo)
    values = np.zeros((4, 4), dtype=np.float32)
    values[1, 1], values[2, 2] = 8, -8
    for signed in (False, True):
        shown = np.abs(values) if not signed else values
        drawn = blend(picture, shown, geometry, signed=signed)
        lab = np.asarray(drawn.convert("LAB")).astype(float)
        lab[..., 2] = (lab[..., 2] + 128) % 256  # Pillow stores signed numbers
        ground = lab[25, 175, [0, 2]]
        for at in ((75, 75), (125, 125)) if signed else ((75, 75),):
            assert np.abs(lab[at][[0, 2]] - ground).max() > 25
