"""From a map on the patch grid to a picture: the photo beside its heat map, with caption and
legend. A map is laid on the pixels it came from: `Preprocess.geometry` says which box of the
upright original the model saw. What the model did not see is shown pale and grey.

Values are drawn in multiples of an even share: 1 is what each patch would have if all had the same.
The opacity of the colours is in proportion to the value, so that photo and map are read together.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vit.data.images import read_image
from vit.data.listing import ImageInput, list_images
from vit.data.preprocess import Geometry, Preprocess
from vit.runtime.files import write_atomically

PatchMap = Float[np.ndarray, "rows columns"]
SCALES = ("image", "batch", "fixed")
INTERPOLATIONS = ("smooth", "patches")
FIXED_END = 4.0  # the fixed scale ends at this multiple of an even share
# a map whose maximum is below this multiple of an even share is drawn flat: stretched to the whole
# range of the colours, differences of some percent would look like an object
FLAT_BELOW = 1.2
MAX_SIDE = 512  # of a panel, in pixels
MARGIN = 8
# perceptually even, and told apart with any colour vision; blue is negative, red positive
_SEQUENTIAL = "inferno"
_DIVERGING = "RdBu_r"
# of the highest value
_OPACITY = 0.8
# how much colour the photo loses below a map, whose colours would be taken for its own
_FADING = 0.75
# the darkest colours of the sequential map would hide the photo rather than mark it
_FIRST_COLOUR = 0.35
_FLAT_STRENGTH = 0.25
_MIN_CELL = 6  # pixels of a patch whose edges are drawn
_EDGE_OPACITY = 0.35
_MIN_SIDE = 224  # smaller photos are enlarged, or their captions would be cut
_FONT_SIZE = 12
_LINE = 19
_BAR_WIDTH = 96
_BAR_HEIGHT = 12


@dataclass(frozen=True)
class ColourScale:
    """What the ends of the colour map stand for.

    Args:
        low: the lowest value, in multiples of an even share; of a signed map, minus the highest.
        high: the highest value.
        signed: whether zero is the middle of the colours.
        label: more words for the legend.
    """

    low: float
    high: float
    signed: bool
    label: str = ""

    @property
    def is_flat(self) -> bool:
        """Whether the map is nearly even, so that its differences are not drawn."""
        return not self.signed and self.high < FLAT_BELOW


def save_overlay(
    path: str | Path,
    image: ImageInput,
    values: Float[Tensor, "rows columns"] | PatchMap,
    *,
    preprocess: Preprocess | None = None,
    signed: bool | None = None,
    caption: str = "",
) -> None:
    """Draw one map over one image and write the picture: the image, its heat map beside it, and the
    legend.

    Args:
        path: of the picture; its suffix says the format.
        image: a path, a PIL image or a uint8 array [H, W, 3].
        values: the map on the patch grid, [rows, columns]; drawn in multiples of its mean magnitude.
        preprocess: a bundle's, which says what part of the image the map lies on; by default the
            whole image.
        signed: whether zero is in the middle of the colours; by default where a value is negative.
        caption: a line under the picture.

    Raises:
        ValueError: for an image that can't be read.

    Example:
        >>> result = vit.explain("runs/digits", "photo.png", methods="rollout")
        >>> rollout = result.maps["rollout"]
        >>> vit.save_overlay("map.png", "photo.png", rollout[0])
    """
    photo = next(list_images(image))
    if isinstance(photo, str):
        photo = read_image(Path(photo))
    if preprocess is None:
        geometry = Geometry(photo.size, box=(0.0, 0.0, float(photo.width), float(photo.height)))
    else:
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
    kind = Image.registered_extensions().get(Path(path).suffix.lower(), "PNG")
    write_atomically(Path(path), lambda temporary: picture.save(temporary, format=kind))


def draw_overlay(
    image: Image.Image,
    values: PatchMap,
    geometry: Geometry,
    *,
    scale: ColourScale,
    caption: Sequence[str],
    smooth: bool = True,
    max_side: int = MAX_SIDE,
) -> Image.Image:
    """The photo, of at most `max_side` pixels (0: no limit), its heat map beside it, lines of
    caption, and the legend. Values are in the unit of the scale."""
    width, height = panel_size(image.size, max_side)
    photo = image.resize((width, height), Image.Resampling.LANCZOS)
    panels = Image.new("RGB", (2 * width + MARGIN, height), "white")
    panels.paste(photo, (0, 0))
    heat = blend(photo, values, geometry, scale=scale, smooth=smooth)
    panels.paste(heat, (width + MARGIN, 0))
    return _add_text(panels, values, scale=scale, caption=caption)


def panel_size(size: tuple[int, int], max_side: int = MAX_SIDE) -> tuple[int, int]:
    """(width, height) in which a photo of this size is drawn."""
    longest = max(size)
    scaling = min(max(longest, _MIN_SIDE), max_side or math.inf) / longest
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
) -> Image.Image:
    """The map over the photo, which loses most of its colour there. With opacity 0 the pixels that
    the model saw are the photo's own.

    Args:
        photo: the whole upright original, in any size.
        values: the map, in the unit of the scale.
        geometry: where the model's input lies on the original.
        scale: of the colours.
        opacity: of the highest value, 0 to 1; that of others is in proportion.
        smooth: interpolate between the patches' centres; else each patch has one colour, and its
            edges are drawn.
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
    if coverage.all():
        return blended
    unseen = Image.blend(grey, Image.new("RGB", photo.size, (192, 192, 192)), 0.5)
    return Image.composite(blended, unseen, Image.fromarray((coverage * 255).astype(np.uint8)))


def _shade(
    values: Float[np.ndarray, "height width"], scale: ColourScale
) -> tuple[Image.Image, Float[np.ndarray, "height width"]]:
    """The colour of each value, and its strength: 0, where the photo is visible, to 1."""
    if scale.is_flat:
        strength = np.full_like(values, _FLAT_STRENGTH)
    elif scale.signed:
        strength = np.clip(np.abs(values) / (scale.high or 1), 0, 1)
    else:
        strength = np.clip((values - scale.low) / (scale.high - scale.low), 0, 1)
    if scale.signed:
        # from the middle of each half of the colours on, but not to their ends: paler ones would
        # whiten the photo, darker ones hide it
        fractions = 0.5 + np.sign(values) * (0.25 + 0.15 * strength)
    else:
        fractions = _FIRST_COLOUR + (1 - _FIRST_COLOUR) * strength
    return draw_heat(fractions, ColourScale(0.0, 1.0, scale.signed)), strength


def _draw_edges(geometry: Geometry, *, grid: tuple[int, int], size: tuple[int, int]) -> Image.Image:
    """The opacity of the lines between patches on a photo of this size; none where patches are
    small."""
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
    """Lay a map on an image that shows the whole upright original.

    Args:
        values: the map, [rows, columns].
        geometry: where the model's input lies on the original.
        size: (width, height) of the image.
        smooth: interpolate between the patches' centres; else each pixel has its patch's value.

    Returns:
        The values (0 outside the box that the model saw) and the coverage, 1 inside it and 0
        outside.
    """
    left, top, right, bottom = map(float, geometry.box)
    width, height = geometry.original_size
    rows, columns = values.shape
    across = _axis_weights(size[0], width, start=left, stop=right, cells=columns, smooth=smooth)
    down = _axis_weights(size[1], height, start=top, stop=bottom, cells=rows, smooth=smooth)
    # not by @: numpy's threads for products would wait, busily, on the cores that the model works
    # on
    lines = np.einsum("hr,rc->hc", down, values.astype(np.float64))
    placed = np.einsum("hc,wc->hw", lines, across).astype(np.float32)
    inside_down = down.sum(axis=1).round().astype(np.float32)
    inside_across = across.sum(axis=1).round().astype(np.float32)
    return placed, np.outer(inside_down, inside_across)


@lru_cache(maxsize=64)  # for photos of the same size
def _axis_weights(
    pixels: int, original: int, *, start: float, stop: float, cells: int, smooth: bool
) -> Float[np.ndarray, "pixels cells"]:
    """How much of each cell a pixel shows along one axis; a row of zeros for a pixel outside start
    … stop."""
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


def fit_scale(
    maps: Sequence[Float[np.ndarray, "..."]], *, signed: bool, label: str = ""
) -> ColourScale:
    """From the lowest to the highest value of the maps, symmetric about zero when signed."""
    low = min(float(values.min()) for values in maps)
    high = max(float(values.max()) for values in maps)
    if signed:
        high = max(abs(low), abs(high))
        low = -high
    return ColourScale(low, high, signed, label)


def relative_to_uniform(values: PatchMap) -> PatchMap:
    """A map in multiples of a uniform one: 1 is what each patch would have if all had the same."""
    total = float(np.abs(values).sum())
    return values * np.float32(values.size / total) if total > 0 else values


def quantise(
    values: Float[np.ndarray, "*shape"], *, low: float, high: float
) -> UInt8[np.ndarray, "*shape"]:
    """Values as 0 (low) to 255 (high); a constant map is the middle."""
    fraction = (values - low) / (high - low) if high > low else np.full_like(values, 0.5)
    cells: np.ndarray = (np.clip(fraction, 0, 1) * 255).round().astype(np.uint8)
    return cells


@lru_cache
def palette(*, signed: bool) -> UInt8[np.ndarray, "256 3"]:
    """The colours of 0 to 255."""
    from matplotlib import colormaps  # takes half a second to import

    colours = colormaps[_DIVERGING if signed else _SEQUENTIAL](np.arange(256))[:, :3]
    cells: np.ndarray = (colours * 255).round().astype(np.uint8)
    return cells


def draw_heat(values: Float[np.ndarray, "height width"], scale: ColourScale) -> Image.Image:
    """Values as colours; those of a constant map are the middle one."""
    picture = Image.fromarray(quantise(values, low=scale.low, high=scale.high))
    # Pillow colours faster than numpy, and without the GIL
    picture.putpalette(palette(signed=scale.signed).tobytes())
    return picture.convert("RGB")


def _add_text(
    picture: Image.Image, values: PatchMap, *, scale: ColourScale, caption: Sequence[str]
) -> Image.Image:
    """The picture on white, with lines of text and the legend under it."""
    width = max(picture.width, 3 * _BAR_WIDTH) + 2 * MARGIN
    lines = [line for text in caption for line in wrap(text, width - 2 * MARGIN)]
    height = picture.height + 3 * MARGIN + _LINE * (len(lines) + 1)
    page = Image.new("RGB", (width, height), "white")
    page.paste(picture, (MARGIN, MARGIN))
    top = picture.height + 2 * MARGIN
    page.paste(draw_lines(lines, width - MARGIN), (MARGIN, top))
    top += _LINE * len(lines)

    draw = ImageDraw.Draw(page)
    if scale.is_flat:
        ends = f"{values.min():.3g} to {values.max():.3g} times an even share"
        text = _shorten(f"nearly even, so drawn flat: {ends}", width - 2 * MARGIN)
        draw.text((MARGIN, top), text, fill="black", font=_font())
        return page

    # the lowest value, the colours as they lie on white, the highest value and what they stand for
    low = f"{scale.low:.3g}"
    draw.text((MARGIN, top), low, fill="black", font=_font())
    left = MARGIN + round(_length(low)) + 4
    ramp = np.linspace(scale.low, scale.high, _BAR_WIDTH, dtype=np.float32)
    heat, strength = _shade(np.tile(ramp, (_BAR_HEIGHT, 1)), scale)
    mask = Image.fromarray((strength * 255).round().astype(np.uint8))
    page.paste(heat, (left, top + 3), mask)
    left += _BAR_WIDTH + 4
    more = f", {scale.label}" if scale.label else ""
    high = _shorten(f"{scale.high:.3g} times an even share{more}", width - left)
    draw.text((left, top), high, fill="black", font=_font())
    return page


def draw_lines(lines: Sequence[str], width: int) -> Image.Image:
    """Lines of text on white."""
    block = Image.new("RGB", (width, _LINE * len(lines)), "white")
    for number, line in enumerate(lines):
        block.paste(_draw_line(line), (0, number * _LINE))
    return block


# FreeType takes longer than all the rest of a picture, and most lines are those of the last
@lru_cache(maxsize=256)
def _draw_line(text: str) -> Image.Image:
    line = Image.new("RGB", (math.ceil(_length(text)) + MARGIN, _LINE), "white")
    ImageDraw.Draw(line).text((0, 0), text, fill="black", font=_font())
    return line


@lru_cache(maxsize=1024)
def _length(text: str) -> float:
    """Pixels."""
    return _font().getlength(text)


def wrap(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width` pixels, broken between words where possible and never
    before a %."""
    lines = []
    while _length(text) > width:
        fitting = [n for n in range(1, len(text)) if _length(text[:n]) <= width]
        end = max(fitting, default=1)
        spaces = [space for space in re.finditer(r" +(?!%)", text) if 0 < space.start() <= end]
        cut, start = spaces[-1].span() if spaces else (end, end)
        lines.append(text[:cut])
        text = text[start:]
    return [*lines, text]


def _shorten(text: str, width: int) -> str:
    """`text`, cut with an ellipsis to `width` pixels."""
    shown = text
    while text and _length(shown) > width:
        text = text[:-1]
        shown = text + "…"
    return shown


@lru_cache
def _font() -> ImageFont.FreeTypeFont:
    from matplotlib import get_data_path  # as `palette`

    # Pillow's own font has neither × nor é
    return ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf", _FONT_SIZE)
