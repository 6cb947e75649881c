"""From a map on the patch grid to a picture: the photo beside its heat map, with caption and legend. A map is laid on
the pixels it came from: `Preprocess.geometry` says which box of the upright original the model saw. What the model did
not see is shown in grey."""

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

from vit.data.images import Geometry, Preprocess, read_image
from vit.data.inputs import ImageInput, list_images
from vit.runtime.files import write_atomically

# perceptually even, and told apart with any colour vision; blue is negative, red positive
SEQUENTIAL, DIVERGING = "inferno", "RdBu_r"
OPACITY = 0.6
SCALES = ("image", "batch", "fixed")
FIXED_END = 4.0  # the fixed scale ends at this multiple of a uniform map
PatchMap = Float[np.ndarray, "rows columns"]
MAX_SIDE, _MIN_SIDE = 512, 224  # of a panel, in pixels
_MARGIN, _FONT_SIZE, _LINE = 8, 14, 19
_BAR_WIDTH, _BAR_HEIGHT = 96, 12
_TILE, _LABEL_WIDTH = 96, 64  # of a contact sheet


@dataclass(frozen=True)
class ColourScale:
    """What the ends of the colour map stand for, and the words that say so in the legend. `relative`: the values are
    drawn as multiples of a uniform map."""

    low: float
    high: float
    signed: bool
    label: str
    relative: bool = False


def place_map(
    values: PatchMap, geometry: Geometry, *, size: tuple[int, int], smooth: bool
) -> tuple[Float[np.ndarray, "height width"], Float[np.ndarray, "height width"]]:
    """The map on an image of `size` (width, height), which shows the whole upright original. Returns the values (0
    outside the box the model saw) and the coverage, 1 inside it and 0 outside. `smooth` interpolates between the
    patches' centres; otherwise a pixel has the value of the patch it lies in."""
    left, top, right, bottom = map(float, geometry.box)
    (width, height), (rows, columns) = geometry.original_size, values.shape
    across = _axis_weights(size[0], width, start=left, stop=right, cells=columns, smooth=smooth)
    down = _axis_weights(size[1], height, start=top, stop=bottom, cells=rows, smooth=smooth)
    # not by @: numpy's threads for products would wait, busily, on the cores that the model works on
    lines = np.einsum("hr,rc->hc", down, values.astype(np.float64))
    placed = np.einsum("hc,wc->hw", lines, across).astype(np.float32)
    inside = [weights.sum(axis=1).round().astype(np.float32) for weights in (down, across)]
    return placed, np.outer(*inside)


@lru_cache(maxsize=64)  # for photos of the same size
def _axis_weights(
    pixels: int, original: int, *, start: float, stop: float, cells: int, smooth: bool
) -> Float[np.ndarray, "pixels cells"]:
    """How much of each cell a pixel shows along one axis; a row of zeros for a pixel outside start … stop."""
    position = ((np.arange(pixels) + 0.5) * original / pixels - start) / (stop - start) * cells  # cell i: i to i + 1
    weights = np.zeros((pixels, cells))
    inside = np.flatnonzero((position >= 0) & (position < cells))
    for cell, of_cell in enumerate(np.eye(cells)):
        shown = np.interp(position[inside] - 0.5, np.arange(cells), of_cell)
        weights[inside, cell] = shown if smooth else position[inside].astype(int) == cell
    return weights


def find_range(maps: Sequence[Float[np.ndarray, "..."]], *, signed: bool) -> tuple[float, float]:
    """Lowest and highest value, symmetric about zero when signed."""
    low, high = min(float(values.min()) for values in maps), max(float(values.max()) for values in maps)
    end = max(abs(low), abs(high))
    return (-end, end) if signed else (low, high)


def relative_to_uniform(values: PatchMap) -> PatchMap:
    """A map in multiples of a uniform one: 1 is what each patch would have if all had the same."""
    total = float(np.abs(values).sum())
    return values * np.float32(values.size / total) if total > 0 else values


def quantise(values: Float[np.ndarray, "*shape"], *, low: float, high: float) -> UInt8[np.ndarray, "*shape"]:
    """Values as 0 (low) to 255 (high); a constant map is the middle."""
    fraction = (values - low) / (high - low) if high > low else np.full_like(values, 0.5)
    cells: np.ndarray = (np.clip(fraction, 0, 1) * 255).round().astype(np.uint8)
    return cells


def colour(
    values: Float[np.ndarray, "height width"], *, low: float, high: float, signed: bool
) -> UInt8[np.ndarray, "height width 3"]:
    """Values as colours; a constant map is the middle one."""
    return np.asarray(_draw_heat(values, ColourScale(low, high, signed, "")))


def _draw_heat(values: Float[np.ndarray, "height width"], scale: ColourScale) -> Image.Image:
    picture = Image.fromarray(quantise(values, low=scale.low, high=scale.high))
    picture.putpalette(palette(signed=scale.signed).tobytes())  # Pillow colours faster than numpy, and without the GIL
    return picture.convert("RGB")


def save_overlay(
    path: str | Path,
    image: ImageInput,
    values: Float[Tensor, "rows columns"] | PatchMap,
    *,
    preprocess: Preprocess | None = None,
    signed: bool | None = None,
    caption: str = "",
) -> None:
    """Draw one map over one image and write the picture: the image, its heat map beside it, and the legend. `values`
    lie on the part of the image that `preprocess` (a bundle's) cuts out for the model; without it, on the whole image.
    `signed` maps have zero in the middle of the colours; by default those with a negative value are."""
    photo = next(list_images(image))
    photo = read_image(Path(photo)) if isinstance(photo, str) else photo
    whole = Geometry(original_size=photo.size, box=(0.0, 0.0, float(photo.width), float(photo.height)))
    geometry = whole if preprocess is None else preprocess.geometry(photo.size)
    array = torch.as_tensor(values).detach().float().cpu().numpy()
    signed = bool((array < 0).any()) if signed is None else signed
    scale = ColourScale(*find_range([array], signed=signed), signed, "scale of this image")
    picture = draw_overlay(photo, array, geometry, scale=scale, caption=[caption] if caption else [])
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
    """The photo, of at most `max_side` pixels (0: no limit), its heat map beside it, lines of caption and warning, and
    the legend."""
    longest = max(image.size)
    scaling = min(max(longest, _MIN_SIDE), max_side or math.inf) / longest
    width, height = (max(round(side * scaling), 1) for side in image.size)
    photo = image.resize((width, height), Image.Resampling.LANCZOS)
    page = Image.new("RGB", (2 * width + _MARGIN, height), "white")
    page.paste(photo, (0, 0))
    page.paste(blend(photo, values, geometry, scale=scale), (width + _MARGIN, 0))
    return _add_text(page, scale=scale, caption=caption, warnings=warnings)


def blend(
    photo: Image.Image, values: PatchMap, geometry: Geometry, *, scale: ColourScale, opacity: float = OPACITY
) -> Image.Image:
    """The map over the photo. With opacity 0 the pixels that the model saw are the photo's own. The opacity of a signed
    map goes with its magnitude: where it is zero, the photo is visible."""
    placed, coverage = place_map(values, geometry, size=photo.size, smooth=True)
    if scale.signed:
        strength = np.clip(np.abs(placed) / (scale.high or 1), 0, 1)
        heat = _draw_heat(np.sign(placed) * (0.5 + 0.5 * strength) * scale.high, scale)
        mask = Image.fromarray((np.sqrt(strength) * opacity * 255).round().astype(np.uint8))
        blended = Image.composite(heat, photo, mask)
    else:
        blended = Image.blend(photo, _draw_heat(placed, scale), opacity)
    if coverage.all():
        return blended
    unseen = Image.blend(photo.convert("L"), Image.new("L", photo.size, 192), 0.5).convert("RGB")
    return Image.composite(blended, unseen, Image.fromarray((coverage * 255).astype(np.uint8)))


def draw_sheet(
    tiles: Float[np.ndarray, "layers heads rows columns"],
    *,
    layers: Sequence[str],
    heads: Sequence[str],
    scale: ColourScale,
    caption: Sequence[str],
) -> Image.Image:
    """A contact sheet: a row of maps for each layer, a column for each head, patches as squares."""
    rows, columns = tiles.shape[-2:]
    cell = max(_TILE // max(rows, columns), 1)
    width, height = columns * cell + 4, rows * cell + 4
    page = Image.new("RGB", (_LABEL_WIDTH + width * len(heads), _LINE + height * len(layers)), "white")
    draw = ImageDraw.Draw(page)
    for column, head in enumerate(heads):
        draw.text((_LABEL_WIDTH + column * width, 0), _fit(head, width), fill="black", font=_font())
    for row, layer in enumerate(layers):
        top = _LINE + row * height
        draw.text((0, top), layer, fill="black", font=_font())
        for column in range(len(heads)):
            tile = _draw_heat(tiles[row, column], scale).resize((columns * cell, rows * cell), Image.Resampling.NEAREST)
            page.paste(tile, (_LABEL_WIDTH + column * width, top))
    return _add_text(page, scale=scale, caption=caption, warnings=())


def _add_text(
    picture: Image.Image, *, scale: ColourScale, caption: Sequence[str], warnings: Sequence[str]
) -> Image.Image:
    """The picture on white, with lines of text and the colour bar under it."""
    width = max(picture.width, 3 * _BAR_WIDTH) + 2 * _MARGIN
    lines = [(text, "black") for text in caption] + [(f"! {text}", "#b00020") for text in warnings]
    texts = [(line, ink) for text, ink in lines for line in _wrap(text, width - 2 * _MARGIN)]
    page = Image.new("RGB", (width, picture.height + 3 * _MARGIN + _LINE * (len(texts) + 1)), "white")
    page.paste(picture, (_MARGIN, _MARGIN))
    draw, top = ImageDraw.Draw(page), picture.height + 2 * _MARGIN
    for text, ink in texts:
        page.paste(_draw_line(text, ink), (0, top))
        top += _LINE
    low = f"{scale.low:.3g}"
    draw.text((_MARGIN, top), low, fill="black", font=_font())
    left = _MARGIN + round(_length(low)) + 4
    ramp = np.linspace(scale.low, scale.high, _BAR_WIDTH, dtype=np.float32)[None].repeat(_BAR_HEIGHT, axis=0)
    page.paste(_draw_heat(ramp, scale), (left, top + 3))
    left += _BAR_WIDTH + 4
    draw.text((left, top), _fit(f"{scale.high:.3g}  {scale.label}", width - left), fill="black", font=_font())
    return page


@lru_cache(maxsize=256)  # FreeType takes longer than all the rest of a picture, and most lines are those of the last
def _draw_line(text: str, ink: str) -> Image.Image:
    line = Image.new("RGB", (math.ceil(_length(text)) + 2 * _MARGIN, _LINE), "white")
    ImageDraw.Draw(line).text((_MARGIN, 0), text, fill=ink, font=_font())
    return line


@lru_cache(maxsize=1024)
def _length(text: str) -> float:
    """Pixels."""
    return _font().getlength(text)


def _wrap(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width` pixels, broken between words where possible and never before a %."""
    lines = []
    while _length(text) > width:
        end = next((n for n in range(len(text) - 1, 0, -1) if _length(text[:n]) <= width), 1)
        spaces = [space for space in re.finditer(r" +(?!%)", text) if 0 < space.start() <= end]
        cut, start = spaces[-1].span() if spaces else (end, end)
        lines.append(text[:cut])
        text = text[start:]
    return [*lines, text]


def _fit(text: str, width: int) -> str:
    """`text`, cut with an ellipsis to `width` pixels."""
    shown = text
    while text and _length(shown) > width:
        text = text[:-1]
        shown = text + "…"
    return shown


@lru_cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(_FONT_SIZE)


@lru_cache
def palette(*, signed: bool) -> UInt8[np.ndarray, "256 3"]:
    """The colours of 0 to 255."""
    from matplotlib import colormaps

    return (colormaps[DIVERGING if signed else SEQUENTIAL](np.arange(256))[:, :3] * 255).round().astype(np.uint8)
