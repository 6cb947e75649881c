"""From a map on the patch grid to a picture: the photo beside its heat map, with caption and
legend. A map is laid on the pixels it came from: `Preprocess.geometry` says which box of the
upright original the model saw. What the model did not see is shown in grey."""

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

from vit.data.images import Geometry, ImageInput, Preprocess, list_images, read_image
from vit.runtime.files import write_atomically

PatchMap = Float[np.ndarray, "rows columns"]
SCALES = ("image", "batch", "fixed")
FIXED_END = 4.0  # the fixed scale ends at this multiple of a uniform map
MAX_SIDE = 512  # of a panel, in pixels
# perceptually even, and told apart with any colour vision; blue is negative, red positive
_SEQUENTIAL = "inferno"
_DIVERGING = "RdBu_r"
_OPACITY = 0.6
_MIN_SIDE = 224  # smaller photos are enlarged, or their captions would be cut
_MARGIN = 8
_FONT_SIZE = 14
_LINE = 19
_BAR_WIDTH = 96
_BAR_HEIGHT = 12
_WARNING_INK = "#b00020"


@dataclass(frozen=True)
class ColourScale:
    """What the ends of the colour map stand for.

    Args:
        low: the lowest value; of a signed map, minus the highest.
        high: the highest value.
        signed: whether zero is the middle of the colours.
        label: words for the legend.
        relative: whether values are drawn as multiples of a uniform map.
    """

    low: float
    high: float
    signed: bool
    label: str
    relative: bool = False


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
        values: the map on the patch grid, [rows, columns].
        preprocess: a bundle's, which says what part of the image the map lies on; by default the
            whole image.
        signed: whether zero is in the middle of the colours; by default where a value is negative.
        caption: a line under the picture.

    Raises:
        ValueError: for an image that can't be read.
    """
    photo = next(list_images(image))
    if isinstance(photo, str):
        photo = read_image(Path(photo))
    if preprocess is None:
        geometry = Geometry(photo.size, box=(0.0, 0.0, float(photo.width), float(photo.height)))
    else:
        geometry = preprocess.geometry(photo.size)
    array = torch.as_tensor(values).detach().float().cpu().numpy()
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
    warnings: Sequence[str] = (),
    max_side: int = MAX_SIDE,
) -> Image.Image:
    """The photo, of at most `max_side` pixels (0: no limit), its heat map beside it, lines of
    caption and warning, and the legend."""
    longest = max(image.size)
    scaling = min(max(longest, _MIN_SIDE), max_side or math.inf) / longest
    width, height = (max(round(side * scaling), 1) for side in image.size)
    photo = image.resize((width, height), Image.Resampling.LANCZOS)
    panels = Image.new("RGB", (2 * width + _MARGIN, height), "white")
    panels.paste(photo, (0, 0))
    panels.paste(blend(photo, values, geometry, scale=scale), (width + _MARGIN, 0))
    return _add_text(panels, scale=scale, caption=caption, warnings=warnings)


def blend(
    photo: Image.Image,
    values: PatchMap,
    geometry: Geometry,
    *,
    scale: ColourScale,
    opacity: float = _OPACITY,
) -> Image.Image:
    """The map over the photo. With opacity 0 the pixels that the model saw are the photo's own. The
    opacity of a signed map goes with its magnitude: where it is zero, the photo is visible."""
    placed, coverage = place_map(values, geometry, size=photo.size)
    if scale.signed:
        strength = np.clip(np.abs(placed) / (scale.high or 1), 0, 1)
        # from the middle of each half of the colours on: paler ones would whiten the photo
        heat = draw_heat(np.sign(placed) * (0.5 + 0.5 * strength) * scale.high, scale)
        mask = Image.fromarray((np.sqrt(strength) * opacity * 255).round().astype(np.uint8))
        blended = Image.composite(heat, photo, mask)
    else:
        blended = Image.blend(photo, draw_heat(placed, scale), opacity)
    if coverage.all():
        return blended
    unseen = Image.blend(photo.convert("L"), Image.new("L", photo.size, 192), 0.5).convert("RGB")
    return Image.composite(blended, unseen, Image.fromarray((coverage * 255).astype(np.uint8)))


def place_map(
    values: PatchMap, geometry: Geometry, *, size: tuple[int, int]
) -> tuple[Float[np.ndarray, "height width"], Float[np.ndarray, "height width"]]:
    """Lay a map on an image that shows the whole upright original, interpolated between the
    patches' centres.

    Args:
        values: the map, [rows, columns].
        geometry: where the model's input lies on the original.
        size: (width, height) of the image.

    Returns:
        The values (0 outside the box that the model saw) and the coverage, 1 inside it and 0
        outside.
    """
    left, top, right, bottom = map(float, geometry.box)
    width, height = geometry.original_size
    rows, columns = values.shape
    across = _axis_weights(size[0], width, start=left, stop=right, cells=columns)
    down = _axis_weights(size[1], height, start=top, stop=bottom, cells=rows)
    # not by @: numpy's threads for products would wait, busily, on the cores that the model works
    # on
    lines = np.einsum("hr,rc->hc", down, values.astype(np.float64))
    placed = np.einsum("hc,wc->hw", lines, across).astype(np.float32)
    inside_down = down.sum(axis=1).round().astype(np.float32)
    inside_across = across.sum(axis=1).round().astype(np.float32)
    return placed, np.outer(inside_down, inside_across)


@lru_cache(maxsize=64)  # for photos of the same size
def _axis_weights(
    pixels: int, original: int, *, start: float, stop: float, cells: int
) -> Float[np.ndarray, "pixels cells"]:
    """How much of each cell a pixel shows along one axis; a row of zeros for a pixel outside start
    … stop."""
    in_original = (np.arange(pixels) + 0.5) * original / pixels
    position = (in_original - start) / (stop - start) * cells  # cell i: i to i + 1
    is_inside = (position >= 0) & (position < cells)
    weights = [
        is_inside * np.interp(position - 0.5, np.arange(cells), one_hot)
        for one_hot in np.eye(cells)
    ]
    return np.stack(weights, axis=1)


def fit_scale(
    maps: Sequence[Float[np.ndarray, "..."]], *, signed: bool, label: str = "scale of this image"
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
    picture: Image.Image, *, scale: ColourScale, caption: Sequence[str], warnings: Sequence[str]
) -> Image.Image:
    """The picture on white, with lines of text and the colour bar under it."""
    width = max(picture.width, 3 * _BAR_WIDTH) + 2 * _MARGIN
    lines = [(line, "black") for text in caption for line in _wrap(text, width - 2 * _MARGIN)]
    for text in warnings:
        lines += [(line, _WARNING_INK) for line in _wrap(f"! {text}", width - 2 * _MARGIN)]
    height = picture.height + 3 * _MARGIN + _LINE * (len(lines) + 1)
    page = Image.new("RGB", (width, height), "white")
    page.paste(picture, (_MARGIN, _MARGIN))

    top = picture.height + 2 * _MARGIN
    for line, ink in lines:
        page.paste(_draw_line(line, ink), (0, top))
        top += _LINE

    # the legend: the lowest value, the colours, the highest value and what they stand for
    draw = ImageDraw.Draw(page)
    low = f"{scale.low:.3g}"
    draw.text((_MARGIN, top), low, fill="black", font=_font())
    left = _MARGIN + round(_length(low)) + 4
    ramp = np.linspace(scale.low, scale.high, _BAR_WIDTH, dtype=np.float32)
    page.paste(draw_heat(np.tile(ramp, (_BAR_HEIGHT, 1)), scale), (left, top + 3))
    left += _BAR_WIDTH + 4
    high = _shorten(f"{scale.high:.3g}  {scale.label}", width - left)
    draw.text((left, top), high, fill="black", font=_font())
    return page


# FreeType takes longer than all the rest of a picture, and most lines are those of the last
@lru_cache(maxsize=256)
def _draw_line(text: str, ink: str) -> Image.Image:
    line = Image.new("RGB", (math.ceil(_length(text)) + 2 * _MARGIN, _LINE), "white")
    ImageDraw.Draw(line).text((_MARGIN, 0), text, fill=ink, font=_font())
    return line


@lru_cache(maxsize=1024)
def _length(text: str) -> float:
    """Pixels."""
    return _font().getlength(text)


def _wrap(text: str, width: int) -> list[str]:
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
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(_FONT_SIZE)
