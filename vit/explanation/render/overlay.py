"""From a map on the patch grid to a picture: the photo and its heat map.

A map is drawn on the pixels that the model saw: `Preprocess.geometry` gives their box in the
upright original. A thin frame is around that box, and the photo is dark and grey outside of it. The
opacity of the colours grows with the value, so that photo and map are visible together. A
line is around the patches that hold half of the evidence.
"""

from functools import lru_cache

import numpy as np
from jaxtyping import Float
from PIL import Image

from vit.data.preprocess import Geometry
from vit.explanation.render.outline import draw_lines_of_map
from vit.explanation.render.scale import ColourScale, PatchMap, draw_heat

MAX_SIDE = 512  # largest side of a photo in pixels
_OPACITY = 0.8  # opacity of the highest value
UNIT = "× the average patch"
# fraction of its colour that the photo loses below a map, so that it isn't confused with the map's
_FADING = 0.75
_DIMMING = 0.5  # fraction of its brightness that the photo loses where the model didn't see it
# the darkest colours of the sequential map would hide the photo instead of marking it
_FIRST_COLOUR = 0.35
_FLAT_STRENGTH = 0.15
# exponent of a value's opacity: in proportion (1), middle values couldn't be seen on small pictures
_STRENGTH_EXPONENT = 0.7
_MIN_SIDE = 224  # smaller photos are enlarged
_GAP = 8  # pixels between photo and map


def draw_overlay(
    image: Image.Image, values: PatchMap, geometry: Geometry, *, scale: ColourScale
) -> Image.Image:
    """Draw the photo and, on its right, the map over it. Values are in multiples of the average
    patch."""
    width, height = panel_size(image.size)
    photo = image.resize((width, height), Image.Resampling.LANCZOS)
    panels = Image.new("RGB", (2 * width + _GAP, height), "white")
    panels.paste(photo, (0, 0))
    panels.paste(blend(photo, values, geometry, scale=scale), (width + _GAP, 0))
    return panels


def panel_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return the (width, height) of a photo of this size in pictures."""
    return fit_size(size, min(max(*size, _MIN_SIDE), MAX_SIDE))


def fit_size(size: tuple[int, int], longer: int) -> tuple[int, int]:
    """Return a (width, height) of the same shape whose longer side has `longer` pixels."""
    scaling = longer / max(size)
    width, height = (max(round(side * scaling), 1) for side in size)
    return width, height


def blend(
    photo: Image.Image,
    values: PatchMap,
    geometry: Geometry,
    *,
    scale: ColourScale,
    lines: bool = True,
) -> Image.Image:
    """Draw the map over the photo, which loses most of its colour.

    Args:
        photo: The whole upright original, in any size.
        values: The map, in multiples of the average patch.
        geometry: Box of the model's input in the original.
        scale: Scale of the colours.
        lines: Draw the outline of half of the evidence and the frame of the model's input.
    """
    placed, coverage = place_map(values, geometry, size=photo.size)
    heat, strength = shade(placed, scale)
    grey = photo.convert("L").convert("RGB")
    faded = Image.blend(photo, grey, _FADING)
    mask = Image.fromarray((strength * _OPACITY * 255).round().astype(np.uint8))
    blended = Image.composite(heat, faded, mask)
    if not coverage.all():
        unseen = Image.blend(grey, Image.new("RGB", photo.size), _DIMMING)
        seen = Image.fromarray((coverage * 255).astype(np.uint8))
        blended = Image.composite(blended, unseen, seen)
    if lines:
        draw_lines_of_map(blended, values, geometry, scale=scale)
    return blended


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
    strength = strength**_STRENGTH_EXPONENT
    return draw_heat(fractions, ColourScale(0.0, 1.0, scale.signed)), strength


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


def draw_colours(values: Float[np.ndarray, "height width"], scale: ColourScale) -> Image.Image:
    """Draw values as the colours that they have over white."""
    heat, strength = shade(values, scale)
    mask = Image.fromarray((strength * 255).round().astype(np.uint8))
    return Image.composite(heat, Image.new("RGB", heat.size, "white"), mask)
