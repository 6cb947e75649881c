"""From a map on the patch grid to a picture: the photo with the map's colours over it.

A map is drawn on the pixels that the model saw: `Preprocess.geometry` gives their box in the
upright original. The photo is dark and grey outside of it. The opacity of the colours grows with
the value, so that photo and map are visible together. Values are in multiples of the average patch.
"""

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from vit.data.preprocess import Geometry

PatchMap = Float[np.ndarray, "rows columns"]
PANEL_SIDES = (224, 512)  # smallest and largest side of a photo in pixels
# a map whose maximum is lower is drawn flat: stretched to the whole range of the colours,
# differences of a few percent would look like an object
FLAT_BELOW = 1.2
_FLAT_STRENGTH = 0.15
# matplotlib's inferno and RdYlBu_r, a row each, because importing matplotlib takes half a second:
# readable with any colour vision, and bright on dark photos; blue is negative, red positive
_PALETTES = Path(__file__).with_name("palettes.png")
# the darkest colours of the sequential map would hide the photo instead of marking it
_FIRST_COLOUR = 0.35
# exponent of a value's opacity: in proportion (1), middle values couldn't be seen on small pictures
_STRENGTH_EXPONENT = 0.7
_OPACITY = 0.8  # opacity of the highest value
# fraction of its colour that the photo loses below a map, so that it isn't confused with the map's
_FADING = 0.75
_DIMMING = 0.5  # fraction of its brightness that the photo loses where the model didn't see it
_GAP = 8  # pixels between photo and map


class ColourScale(NamedTuple):
    """The values at the ends of the colours.

    Attributes:
        low: Lowest value, in multiples of the average patch; for a signed map, minus the highest.
        high: Highest value.
        signed: True if zero is the middle of the colours.
    """

    low: float
    high: float
    signed: bool

    @property
    def is_flat(self) -> bool:
        """True if the map is nearly even, so that its differences are not drawn."""
        return not self.signed and self.high < FLAT_BELOW


def fit_scale(values: PatchMap, *, signed: bool) -> ColourScale:
    """Return a scale from the lowest to the highest value, symmetric about zero if signed."""
    low, high = float(values.min()), float(values.max())
    if signed:
        high = max(abs(low), abs(high))
        low = -high
    return ColourScale(low, high, signed)


def relative_to_uniform(values: PatchMap) -> PatchMap:
    """Return a map in multiples of the average patch, in absolute values."""
    total = float(np.abs(values).sum())
    return values * np.float32(values.size / total) if total > 0 else values


def shade(
    values: Float[np.ndarray, "height width"], scale: ColourScale
) -> tuple[Image.Image, Float[np.ndarray, "height width"]]:
    """Return the colour of each value, and its strength: 0 (the photo is visible) to 1."""
    if scale.is_flat:
        strength = np.full_like(values, _FLAT_STRENGTH)
    elif scale.signed:
        strength = np.clip(np.abs(values) / (scale.high or 1), 0, 1)
    else:
        strength = np.clip((values - scale.low) / (scale.high - scale.low), 0, 1)
    if scale.signed:
        # from the middle of each half of the colours, but not to its end: paler colours would
        # whiten the photo, darker ones hide it
        fractions = 0.5 + np.sign(values) * (0.25 + 0.15 * strength)
    else:
        fractions = _FIRST_COLOUR + (1 - _FIRST_COLOUR) * strength
    heat = Image.fromarray((255 * fractions).round().astype(np.uint8))
    # Pillow applies colours faster than numpy, and without the GIL
    heat.putpalette(palette(signed=scale.signed).tobytes())
    return heat.convert("RGB"), strength**_STRENGTH_EXPONENT


@lru_cache
def palette(*, signed: bool) -> UInt8[np.ndarray, "256 3"]:
    """Return the colours of 0 to 255."""
    with Image.open(_PALETTES) as picture:
        colours: np.ndarray = np.asarray(picture.convert("RGB"))[int(signed)]
    return colours


def resize_picture(
    picture: Image.Image, *, min_side: int = 160, max_side: int = 256
) -> Image.Image:
    """Enlarge or reduce a picture so that its longer side is in this range, in pixels."""
    longer = max(picture.size)
    scaling = min(max(longer, min_side), max_side) / longer
    width, height = (max(round(side * scaling), 1) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.LANCZOS)


def draw_overlay(
    photo: Image.Image, values: PatchMap, geometry: Geometry, *, signed: bool
) -> Image.Image:
    """Draw the photo and, on its right, the map over it, see `blend`."""
    photo = resize_picture(photo, min_side=PANEL_SIDES[0], max_side=PANEL_SIDES[1])
    panels = Image.new("RGB", (2 * photo.width + _GAP, photo.height), "white")
    panels.paste(photo, (0, 0))
    panels.paste(blend(photo, values, geometry, signed=signed), (photo.width + _GAP, 0))
    return panels


def blend(photo: Image.Image, values: PatchMap, geometry: Geometry, *, signed: bool) -> Image.Image:
    """Draw the map over the photo, which loses most of its colour.

    Args:
        photo: The whole upright original, in any size.
        values: The map, in multiples of the average patch.
        geometry: Box of the model's input in the original.
        signed: Put zero in the middle of the colours.
    """
    placed, coverage = place_map(values, geometry, size=photo.size)
    heat, strength = shade(placed, fit_scale(values, signed=signed))
    grey = photo.convert("L").convert("RGB")
    faded = Image.blend(photo, grey, _FADING)
    mask = Image.fromarray((strength * _OPACITY * 255).round().astype(np.uint8))
    blended = Image.composite(heat, faded, mask)
    if not coverage.all():
        unseen = Image.blend(grey, Image.new("RGB", photo.size), _DIMMING)
        seen = Image.fromarray((coverage * 255).astype(np.uint8))
        blended = Image.composite(blended, unseen, seen)
    return blended


def place_map(
    values: PatchMap, geometry: Geometry, *, size: tuple[int, int]
) -> tuple[Float[np.ndarray, "height width"], Float[np.ndarray, "height width"]]:
    """Interpolate a map between the patches' centres, on an image of the whole upright original.

    Args:
        values: The map, [rows, columns].
        geometry: Box of the model's input in the original.
        size: (width, height) of the image.

    Returns:
        The values (0 outside of the box) and the coverage, 1 inside of the box and 0 outside.
    """
    left, top, right, bottom = map(float, geometry.box)
    width, height = geometry.original_size
    rows, columns = values.shape
    across = _axis_weights(size[0], width, start=left, stop=right, cells=columns)
    down = _axis_weights(size[1], height, start=top, stop=bottom, cells=rows)
    # einsum instead of @, because numpy's threads for products keep the model's cores busy waiting
    lines = np.einsum("hr,rc->hc", down, values.astype(np.float64))
    placed = np.einsum("hc,wc->hw", lines, across).astype(np.float32)
    inside_down = down.sum(axis=1).round().astype(np.float32)
    inside_across = across.sum(axis=1).round().astype(np.float32)
    return placed, np.outer(inside_down, inside_across)


@lru_cache(maxsize=64)  # for photos of the same size
def _axis_weights(
    pixels: int, original: int, *, start: float, stop: float, cells: int
) -> Float[np.ndarray, "pixels cells"]:
    """Return how much of each cell a pixel shows along one axis; zeros for a pixel outside of start
    to stop."""
    # the centre of each pixel, in pixels of the original
    in_original = (np.arange(pixels) + 0.5) * original / pixels
    position = (in_original - start) / (stop - start) * cells  # cell i: i to i + 1
    is_inside = (position >= 0) & (position < cells)
    weights = [
        is_inside * np.interp(position - 0.5, np.arange(cells), one_hot)
        for one_hot in np.eye(cells)
    ]
    return np.stack(weights, axis=1)
