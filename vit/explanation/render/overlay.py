"""From a map on the patch grid to a picture: the photo and its heat map.

A map is drawn on the pixels that the model saw: `Preprocess.geometry` gives their box in the
upright original. A thin frame is around that box, and the photo is dark and grey outside of it. The
opacity of the colours grows with the value, so that photo and map are visible together. A
line is around the patches that hold half of the evidence.
"""

from functools import lru_cache

import numpy as np
from jaxtyping import Float
from PIL import Image, ImageDraw

from vit.data.preprocess import Geometry
from vit.explanation.render.outline import trace_outline
from vit.explanation.render.scale import ColourScale, PatchMap, shade

MAX_SIDE = 512  # largest side of a photo in pixels
_OPACITY = 0.8  # opacity of the highest value
# fraction of its colour that the photo loses below a map, so that it isn't confused with the map's
_FADING = 0.75
_DIMMING = 0.5  # fraction of its brightness that the photo loses where the model didn't see it
_MIN_SIDE = 224  # smaller photos are enlarged
_GAP = 8  # pixels between photo and map
_PIXELS_PER_WIDTH = 160  # pixels of a picture's longer side for each pixel of a line's width


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
        _draw_lines(blended, values, geometry, scale)
    return blended


def place_outline(
    values: PatchMap, geometry: Geometry, scale: ColourScale
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Return the lines of `trace_outline` in pixels of the upright original."""
    left, top, right, bottom = geometry.box
    rows, columns = values.shape
    x = np.linspace(left, right, columns + 1).tolist()
    y = np.linspace(top, bottom, rows + 1).tolist()
    return [
        ((x[from_x], y[from_y]), (x[to_x], y[to_y]))
        for (from_x, from_y), (to_x, to_y) in trace_outline(values, scale)
    ]


def _draw_lines(
    picture: Image.Image, values: PatchMap, geometry: Geometry, scale: ColourScale
) -> None:
    """Draw the outline of half of the evidence and the frame of the model's input on a picture of
    the whole upright original."""
    across, down = (
        side / original for side, original in zip(picture.size, geometry.original_size, strict=True)
    )
    draw = ImageDraw.Draw(picture)
    width = max(round(max(picture.size) / _PIXELS_PER_WIDTH), 1)
    lines = [
        [(x * across, y * down) for x, y in line] for line in place_outline(values, geometry, scale)
    ]
    # white on black, so that it is seen on any photo
    for colour, thickness in (("black", width + 2), ("white", width)):
        for line in lines:
            draw.line(line, fill=colour, width=thickness)
    left, top, right, bottom = geometry.box
    frame = (left * across, top * down, right * across - 1, bottom * down - 1)
    if frame != (0, 0, picture.width - 1, picture.height - 1):
        draw.rectangle([frame[0] - 1, frame[1] - 1, frame[2] + 1, frame[3] + 1], outline="white")


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
