"""From a map on the patch grid to a picture: the photo and its heat map, with caption and legend.

A map is drawn on the pixels that the model saw: `Preprocess.geometry` gives their box in the
upright original. A thin frame is around that box, and the photo is dark and grey outside of it. The
opacity of the colours grows with the value, so that photo and map are visible together. A
line is around the patches that hold half of the evidence.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, ImageDraw
from torch import Tensor

from vit.data.images import ImageInput, list_images, read_image
from vit.data.preprocess import Geometry, Preprocess
from vit.explanation.render.outline import draw_lines_of_map
from vit.explanation.render.scale import (
    ColourScale,
    PatchMap,
    draw_heat,
    fit_scale,
    relative_to_uniform,
)
from vit.explanation.render.text import (
    LINE,
    MARGIN,
    draw_lines,
    font,
    measure_text,
    shorten_text,
    wrap,
)
from vit.runtime.files import write_atomically

INTERPOLATIONS = ("smooth", "patches")
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
_MIN_CELL = 6  # smallest patch, in pixels, whose edges are drawn
_EDGE_OPACITY = 0.35
_MIN_SIDE = 224  # smaller photos are enlarged, because their captions would be cut
_BAR_WIDTH = 96
_BAR_HEIGHT = 12


def save_overlay(
    path: str | Path,
    image: ImageInput,
    values: Float[Tensor, "rows columns"] | PatchMap,
    *,
    preprocess: Preprocess | None,
    signed: bool | None = None,
    caption: str = "",
) -> None:
    """Draw one map over one image, and write a picture of the image, its heat map
    and the legend.

    Args:
        path: File of the picture; its suffix is the format.
        image: A path, a PIL image or a uint8 array [H, W, 3].
        values: Map on the patch grid, [rows, columns]; drawn in multiples of
            its mean magnitude.
        preprocess: Preprocessing of the model, whose crop is the part of the
            image under the map. None: the model saw the whole image.
        signed: Put zero in the middle of the colours. None: if a value is
            negative.
        caption: A line below the picture.

    Raises:
        ValueError: The image can't be read.

    Example:
        >>> result = vit.explain("runs/digits", "photo.png", methods="rollout")
        >>> rollout = result.maps["rollout"]
        >>> preprocess = result.bundle.preprocess
        >>> vit.save_overlay("map.png", "photo.png", rollout[0], preprocess=preprocess)
    """
    photo = next(list_images(image))
    if isinstance(photo, str):
        photo = read_image(Path(photo))
    if preprocess is None:
        # without a preprocessing, the model is taken to have seen the whole image
        geometry = Geometry(photo.size, box=(0.0, 0.0, float(photo.width), float(photo.height)))
    else:
        photo = preprocess.to_rgb(photo)
        geometry = preprocess.geometry(photo.size)
    array = relative_to_uniform(torch.as_tensor(values).detach().float().cpu().numpy())
    if signed is None:
        signed = bool((array < 0).any())
    picture = draw_overlay(
        photo,
        array,
        geometry,
        scale=fit_scale([array], signed=signed),
        caption=[caption] if caption else [],
    )
    # the temporary file has another suffix, so the format is named
    kind = Image.registered_extensions().get(Path(path).suffix.lower(), "PNG")
    write_atomically(Path(path), lambda temporary: picture.save(temporary, format=kind))


def draw_overlay(
    image: Image.Image,
    values: PatchMap,
    geometry: Geometry,
    *,
    scale: ColourScale,
    caption: Sequence[str] | None,
    smooth: bool = True,
    max_side: int = MAX_SIDE,
) -> Image.Image:
    """Draw the photo, of at most `max_side` pixels (0: no limit), its heat map, the lines of the
    caption, and the legend; without a caption (None) the two pictures alone. Values are in
    multiples of the average patch."""
    width, height = panel_size(image.size, max_side)
    photo = image.resize((width, height), Image.Resampling.LANCZOS)
    panels = Image.new("RGB", (2 * width + MARGIN, height), "white")
    panels.paste(photo, (0, 0))
    heat = blend(photo, values, geometry, scale=scale, smooth=smooth)
    panels.paste(heat, (width + MARGIN, 0))
    if caption is None:
        return panels
    return _add_text(panels, values, scale=scale, caption=caption)


def panel_size(size: tuple[int, int], max_side: int = MAX_SIDE) -> tuple[int, int]:
    """Return the (width, height) of a photo of this size in pictures."""
    # small photos are enlarged to _MIN_SIDE, and large ones reduced to max_side
    return fit_size(size, min(max(*size, _MIN_SIDE), max_side or math.inf))


def fit_size(size: tuple[int, int], longer: int | float) -> tuple[int, int]:
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
    opacity: float = _OPACITY,
    smooth: bool = True,
    lines: bool = True,
) -> Image.Image:
    """Draw the map over the photo, which loses most of its colour. With opacity 0 the pixels that
    the model saw don't change.

    Args:
        photo: The whole upright original, in any size.
        values: The map, in multiples of the average patch.
        geometry: Box of the model's input in the original.
        scale: Scale of the colours.
        opacity: Opacity of the highest value, 0 to 1; that of others grows with the value.
        smooth: Interpolate between the patches' centres. Otherwise each patch has one colour, and
            its edges are drawn.
        lines: Draw the outline of half of the evidence and the frame of the model's input.
    """
    placed, coverage = place_map(values, geometry, size=photo.size, smooth=smooth)
    heat, strength = _shade(placed, scale)
    grey = photo.convert("L").convert("RGB")
    faded = Image.blend(photo, grey, _FADING * min(opacity / _OPACITY, 1))
    mask = Image.fromarray((strength * opacity * 255).round().astype(np.uint8))
    blended = Image.composite(heat, faded, mask)
    if not smooth and opacity > 0:
        edges = _draw_edges(geometry, grid=(values.shape[0], values.shape[1]), size=photo.size)
        blended = Image.composite(Image.new("RGB", photo.size, "white"), blended, edges)
    if not coverage.all():
        unseen = Image.blend(grey, Image.new("RGB", photo.size), _DIMMING)
        seen = Image.fromarray((coverage * 255).astype(np.uint8))
        blended = Image.composite(blended, unseen, seen)
    if lines and opacity > 0:
        draw_lines_of_map(blended, values, geometry, scale=scale)
    return blended


def _shade(
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


def _draw_edges(geometry: Geometry, *, grid: tuple[int, int], size: tuple[int, int]) -> Image.Image:
    """Draw the opacity of the lines between patches on a photo of this size; there are none between
    small patches."""
    edges = Image.new("L", size)
    draw = ImageDraw.Draw(edges)
    ink = round(_EDGE_OPACITY * 255)
    scale_x = size[0] / geometry.original_size[0]
    scale_y = size[1] / geometry.original_size[1]
    left, top, right, bottom = geometry.box
    rows, columns = grid
    if (right - left) / columns * scale_x < _MIN_CELL:
        return edges
    for x in np.linspace(left, right, columns + 1) * scale_x:
        draw.line([(x, top * scale_y), (x, bottom * scale_y)], fill=ink)
    for y in np.linspace(top, bottom, rows + 1) * scale_y:
        draw.line([(left * scale_x, y), (right * scale_x, y)], fill=ink)
    return edges


def place_map(
    values: PatchMap, geometry: Geometry, *, size: tuple[int, int], smooth: bool = True
) -> tuple[Float[np.ndarray, "height width"], Float[np.ndarray, "height width"]]:
    """Interpolate a map to an image of the whole upright original.

    Args:
        values: The map, [rows, columns].
        geometry: Box of the model's input in the original.
        size: (width, height) of the image.
        smooth: Interpolate between the patches' centres. Otherwise each pixel has its patch's
            value.

    Returns:
        The values (0 outside of the box) and the coverage, 1 inside of the box and 0 outside.
    """
    left, top, right, bottom = map(float, geometry.box)
    width, height = geometry.original_size
    rows, columns = values.shape
    across = _axis_weights(size[0], width, start=left, stop=right, cells=columns, smooth=smooth)
    down = _axis_weights(size[1], height, start=top, stop=bottom, cells=rows, smooth=smooth)
    # einsum instead of @, because numpy's threads for products keep the model's cores busy waiting
    lines = np.einsum("hr,rc->hc", down, values.astype(np.float64))
    placed = np.einsum("hc,wc->hw", lines, across).astype(np.float32)
    inside_down = down.sum(axis=1).round().astype(np.float32)
    inside_across = across.sum(axis=1).round().astype(np.float32)
    return placed, np.outer(inside_down, inside_across)


@lru_cache(maxsize=64)  # for photos of the same size
def _axis_weights(
    pixels: int, original: int, *, start: float, stop: float, cells: int, smooth: bool
) -> Float[np.ndarray, "pixels cells"]:
    """Return how much of each cell a pixel shows along one axis; zeros for a pixel outside of start
    to stop."""
    # the centre of each pixel, in pixels of the original
    in_original = (np.arange(pixels) + 0.5) * original / pixels
    position = (in_original - start) / (stop - start) * cells  # cell i: i to i + 1
    is_inside = (position >= 0) & (position < cells)
    if not smooth:
        own_cell = np.floor(position)[:, None] == np.arange(cells)
        own_weights: np.ndarray = (own_cell & is_inside[:, None]).astype(np.float64)
        return own_weights
    weights = [
        is_inside * np.interp(position - 0.5, np.arange(cells), one_hot)
        for one_hot in np.eye(cells)
    ]
    return np.stack(weights, axis=1)


def _add_text(
    picture: Image.Image, values: PatchMap, *, scale: ColourScale, caption: Sequence[str]
) -> Image.Image:
    """Draw the picture on white, with lines of text and the legend below."""
    width = max(picture.width, 3 * _BAR_WIDTH) + 2 * MARGIN
    lines = [line for text in caption for line in wrap(text, width - 2 * MARGIN)]
    height = picture.height + 3 * MARGIN + LINE * (len(lines) + 1)
    page = Image.new("RGB", (width, height), "white")
    page.paste(picture, (MARGIN, MARGIN))
    top = picture.height + 2 * MARGIN
    page.paste(draw_lines(lines, width - MARGIN), (MARGIN, top))
    page.paste(draw_legend(values, scale, width - MARGIN), (MARGIN, top + LINE * len(lines)))
    return page


def draw_legend(values: PatchMap, scale: ColourScale, width: int) -> Image.Image:
    """Draw a line with the lowest value, the colours on white, the highest value and the unit."""
    page = Image.new("RGB", (width, LINE), "white")
    draw = ImageDraw.Draw(page)
    if scale.is_flat:
        ends = f"{values.min():.3g} to {values.max():.3g} {UNIT}"
        text = shorten_text(f"nearly even, so drawn flat: {ends}", width - MARGIN)
        draw.text((0, 0), text, fill="black", font=font())
        return page

    low = f"{scale.low:.3g}"
    draw.text((0, 0), low, fill="black", font=font())
    left = round(measure_text(low)) + 4
    ramp = np.linspace(scale.low, scale.high, _BAR_WIDTH, dtype=np.float32)
    page.paste(draw_colours(np.tile(ramp, (_BAR_HEIGHT, 1)), scale), (left, 3))
    left += _BAR_WIDTH + 4
    more = f", {scale.label}" if scale.label else ""
    high = shorten_text(f"{scale.high:.3g} {UNIT}{more}", width - left)
    draw.text((left, 0), high, fill="black", font=font())
    return page


def draw_colours(values: Float[np.ndarray, "height width"], scale: ColourScale) -> Image.Image:
    """Draw values as the colours that they have over white."""
    heat, strength = _shade(values, scale)
    mask = Image.fromarray((strength * 255).round().astype(np.uint8))
    return Image.composite(heat, Image.new("RGB", heat.size, "white"), mask)
