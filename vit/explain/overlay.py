"""From a map on the patch grid to a picture: the photo beside its heat map, with caption and legend.

A map is laid on the pixels it came from: `Preprocess.geometry` says which box of the upright original the
model saw.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw, ImageFont

from vit.data.images import Geometry

SEQUENTIAL, DIVERGING = "inferno", "RdBu_r"  # perceptually even, and told apart with any colour vision
OPACITY = 0.6
_MIN_SIDE, _MAX_SIDE = 256, 640  # of a panel, in pixels
_MARGIN, _FONT_SIZE = 8, 14


def place_map(
    values: Float[np.ndarray, "rows columns"], geometry: Geometry, *, size: tuple[int, int], smooth: bool
) -> tuple[Float[np.ndarray, "height width"], Float[np.ndarray, "height width"]]:
    """The map on an image of `size` (width, height), which shows the whole upright original, and where it
    covers it.

    Returns the values (0 outside the box the model saw) and a coverage of 0 or 1. `smooth` interpolates
    between the patches' centres; otherwise a pixel has the value of the patch it lies in.
    """
    width, height = size
    left, top, right, bottom = geometry.box
    across = _axis_weights(
        width, geometry.original_size[0], start=left, stop=right, cells=values.shape[1], smooth=smooth
    )
    down = _axis_weights(
        height, geometry.original_size[1], start=top, stop=bottom, cells=values.shape[0], smooth=smooth
    )
    placed = (down @ values.astype(np.float64) @ across.T).astype(np.float32)
    coverage = (down.sum(axis=1)[:, None] * across.sum(axis=1)[None, :]).round().astype(np.float32)
    return placed, coverage


def _axis_weights(
    pixels: int, original: int, *, start: float, stop: float, cells: int, smooth: bool
) -> Float[np.ndarray, "pixels cells"]:
    """How much of each cell a pixel shows along one axis; a row of zeros for a pixel outside start … stop."""
    centres = (np.arange(pixels) + 0.5) * original / pixels
    position = (centres - start) / (stop - start) * cells  # cell i is from i to i + 1
    weights = np.zeros((pixels, cells))
    inside = np.flatnonzero((position >= 0) & (position < cells))
    if smooth:
        shifted = np.clip(position[inside] - 0.5, 0, cells - 1)
        lower = np.minimum(shifted.astype(int), cells - 1)
        upper = np.minimum(lower + 1, cells - 1)
        np.add.at(weights, (inside, lower), 1 - (shifted - lower))
        np.add.at(weights, (inside, upper), shifted - lower)
    else:
        weights[inside, position[inside].astype(int)] = 1
    return weights


def find_range(maps: Sequence[Float[np.ndarray, "rows columns"]], *, signed: bool) -> tuple[float, float]:
    """What the ends of the colour map stand for: lowest and highest value, symmetric about zero when
    signed."""
    low, high = min(float(values.min()) for values in maps), max(float(values.max()) for values in maps)
    if signed:
        high = max(abs(low), abs(high))
        low = -high
    return low, high


def colour(
    values: Float[np.ndarray, "height width"], *, low: float, high: float, signed: bool
) -> UInt8[np.ndarray, "height width 3"]:
    """Values as colours; a constant map is the middle one."""
    share = (values - low) / (high - low) if high > low else np.full_like(values, 0.5)
    return _palette(DIVERGING if signed else SEQUENTIAL)[
        (np.clip(share, 0, 1) * 255).round().astype(np.uint8)
    ]


def draw_overlay(
    image: Image.Image,
    values: Float[np.ndarray, "rows columns"],
    geometry: Geometry,
    *,
    value_range: tuple[float, float],
    signed: bool,
    caption: Sequence[str],
    legend: str,
    opacity: float = OPACITY,
) -> Image.Image:
    """The photo, its heat map beside it, lines of caption and a legend with the range's numbers."""
    photo = image.resize(_panel_size(image.size), Image.Resampling.LANCZOS)
    pixels = np.asarray(photo, dtype=np.float32)
    placed, coverage = place_map(values, geometry, size=photo.size, smooth=True)
    low, high = value_range
    heat = colour(placed, low=low, high=high, signed=signed)
    alpha = (opacity * coverage)[..., None]
    blended = Image.fromarray((pixels * (1 - alpha) + heat * alpha).round().astype(np.uint8))
    return _compose([photo, blended], caption=caption, legend=legend, value_range=value_range, signed=signed)


def _panel_size(size: tuple[int, int]) -> tuple[int, int]:
    longest = max(size)
    scale = np.clip(longest, _MIN_SIDE, _MAX_SIDE) / longest
    return max(round(size[0] * scale), 1), max(round(size[1] * scale), 1)


def _compose(
    panels: Sequence[Image.Image],
    *,
    caption: Sequence[str],
    legend: str,
    value_range: tuple[float, float],
    signed: bool,
) -> Image.Image:
    """Panels side by side on white, lines of text and the colour bar under them."""
    line = _FONT_SIZE + 5
    width = sum(panel.width for panel in panels) + _MARGIN * (len(panels) + 1)
    height = max(panel.height for panel in panels)
    page = Image.new("RGB", (width, height + 2 * _MARGIN + line * (len(caption) + 1) + _MARGIN), "white")
    left = _MARGIN
    for panel in panels:
        page.paste(panel, (left, _MARGIN))
        left += panel.width + _MARGIN
    draw = ImageDraw.Draw(page)
    top = height + 2 * _MARGIN
    for text in caption:
        draw.text((_MARGIN, top), _fit(text, width - 2 * _MARGIN), fill="black", font=_font())
        top += line
    low, high = value_range
    ramp = np.linspace(low, high, 96, dtype=np.float32)[None].repeat(_FONT_SIZE - 2, axis=0)
    text = f"{low:.3g}"
    draw.text((_MARGIN, top), text, fill="black", font=_font())
    left = _MARGIN + round(draw.textlength(text, font=_font())) + 4
    page.paste(Image.fromarray(colour(ramp, low=low, high=high, signed=signed)), (left, top + 2))
    rest = _fit(f"{high:.3g}   {legend}", width - left - 104)
    draw.text((left + 100, top), rest, fill="black", font=_font())
    return page


def _fit(text: str, width: int) -> str:
    """`text`, cut with an ellipsis to `width` pixels."""
    if _font().getlength(text) <= width:
        return text
    while text and _font().getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"


@lru_cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(_FONT_SIZE)


@lru_cache
def _palette(name: str) -> UInt8[np.ndarray, "256 3"]:
    from matplotlib import colormaps

    return (colormaps[name](np.arange(256))[:, :3] * 255).round().astype(np.uint8)
