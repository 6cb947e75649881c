"""Pictures with text, drawn by matplotlib: a map as a figure for a paper, whose text, lines and colour
bar can be edited, and the contact sheet of many maps."""

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from textwrap import wrap
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from torch import Tensor

from vit.data.images import ImageInput, list_images, read_image
from vit.data.preprocess import Geometry, Preprocess
from vit.explanation.render.overlay import blend, panel_size, place_outline
from vit.explanation.render.page import BADGES
from vit.explanation.render.scale import (
    ColourScale,
    PatchMap,
    fit_scale,
    relative_to_uniform,
    shade,
)
from vit.runtime.files import write_atomically

MAX_SHEET_IMAGES = 24
_FONT_POINTS = 6
_ONE_AT_A_TIME = Lock()  # matplotlib's settings hold for all threads
_GAP_INCHES = 0.05
_BAR_INCHES = 0.1  # width of the colour bar
_CHARACTER_INCHES = 0.048  # mean width of a character
_DPI = 300
_TILE_INCHES = 2.3  # width of a picture on the sheet
_TEXT_INCHES = 1.0  # height of the text below it
_MAX_TILES_ACROSS = 6
_SHEET_DPI = 100


class Tile(NamedTuple):
    """A picture and what stands below it: a title in bold, the word of a badge, and lines."""

    picture: Image.Image
    title: str
    badge: str | None
    lines: Sequence[str]


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
    and the colours.

    Args:
        path: File of the picture; its suffix is the format: .png, .jpg, .svg or
            .pdf.
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
        >>> vit.save_overlay(
        ...     "map.png", "photo.png", rollout[0], preprocess=preprocess
        ... )
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
    # the temporary file has another suffix, so the format is named
    kind = Path(path).suffix.lower().lstrip(".") or "png"
    draw = partial(
        save_figure,
        image=photo,
        values=array,
        geometry=geometry,
        kind=kind,
        scale=fit_scale(array, signed=signed),
        caption=[caption] if caption else [],
    )
    write_atomically(Path(path), draw)


def save_figure(
    path: Path,
    image: Image.Image,
    values: PatchMap,
    geometry: Geometry,
    *,
    kind: str,
    scale: ColourScale,
    caption: Sequence[str],
) -> None:
    """Write the photo, its map with lines, a colour bar and the lines of the caption.

    Equal arguments give equal bytes.

    Args:
        path: The file.
        image: The whole upright original.
        values: The map, in multiples of the average patch.
        geometry: Box of the model's input in the original.
        kind: Format, such as "svg", "pdf" or "png".
        scale: Scale of the colours.
        caption: Lines below the pictures.
    """
    photo = image.resize(panel_size(image.size), Image.Resampling.LANCZOS)
    width, height = (side / _DPI for side in photo.size)
    total = (2 * width + 2 * _GAP_INCHES + _BAR_INCHES, height)
    with _settings():
        figure = Figure(figsize=total, dpi=_DPI)

        def add_axes(left: float, right: float) -> Axes:
            return figure.add_axes((left / total[0], 0, (right - left) / total[0], 1))

        heat = blend(photo, values, geometry, scale=scale, lines=False)
        for picture, left in ((photo, 0.0), (heat, width + _GAP_INCHES)):
            axes = add_axes(left, left + width)
            axes.set_axis_off()
            axes.imshow(picture, extent=(0, image.width, image.height, 0), aspect="auto")
        _draw_lines(axes, values, geometry, scale)
        if not scale.is_flat:
            left = 2 * (width + _GAP_INCHES)
            _draw_bar(add_axes(left, left + _BAR_INCHES), scale)
        lines = _wrap(caption, total[0])
        text = figure.text(0, -_GAP_INCHES / height, lines, va="top", linespacing=1.3)
        text.set_parse_math(False)  # names may have dollar signs
        # the page grows to hold caption and numbers
        figure.savefig(
            path,
            format=kind,
            bbox_inches="tight",
            pad_inches=0.02,
            metadata={"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind),
        )


def draw_sheet(rows: Sequence[Sequence[Tile]]) -> Image.Image:
    """Draw rows of a photo and its maps; rows of few pictures are side by side."""
    tiles = max(map(len, rows))
    columns = min(max(_MAX_TILES_ACROSS // tiles, 1), len(rows))
    num_lines = -(-len(rows) // columns)
    # as high as the highest picture
    shapes = [tile.picture.height / tile.picture.width for row in rows for tile in row]
    size = (
        columns * tiles * _TILE_INCHES,
        num_lines * (min(max(shapes), 2) * _TILE_INCHES + _TEXT_INCHES),
    )
    with _settings():
        figure = Figure(figsize=size, dpi=_SHEET_DPI, layout="constrained")
        grid = figure.subplots(num_lines, columns * tiles, squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for number, row in enumerate(rows):
            first = number % columns * tiles
            for place, tile in enumerate(row, start=first):
                _draw_tile(grid[number // columns, place], tile)
        file = io.BytesIO()
        figure.savefig(file, format="png")
    return Image.open(file).convert("RGB")


def _draw_tile(axes: Axes, tile: Tile) -> None:
    axes.imshow(tile.picture)
    y = -4.0
    parts = [(_wrap([tile.title], _TILE_INCHES), {"weight": "bold"})]
    if tile.badge is not None:
        text, colour = BADGES[tile.badge]
        parts.append((text, {"color": "white", "backgroundcolor": colour}))
    parts.append((_wrap(tile.lines, _TILE_INCHES), {}))
    for text, style in parts:
        if not text:
            continue
        drawn = axes.annotate(
            text, (0, 0), (0, y), xycoords="axes fraction", textcoords="offset points", va="top"
        )
        drawn.set(parse_math=False, **style)
        y -= (_FONT_POINTS * 1.3) * (text.count("\n") + 1) + 4


def _wrap(lines: Sequence[str], inches: float) -> str:
    width = max(int(inches / _CHARACTER_INCHES), 10)
    return "\n".join(part for line in lines for part in wrap(line, width))


@contextmanager
def _settings() -> Iterator[None]:
    """Keep texts as text in the file. The salt makes its ids the same each time."""
    settings: Any = {
        "svg.fonttype": "none",
        "pdf.fonttype": 42,
        "svg.hashsalt": "vit",
        "font.size": _FONT_POINTS,
    }
    with _ONE_AT_A_TIME, rc_context(settings), warnings.catch_warnings():
        # a name may have characters that the font lacks
        warnings.filterwarnings("ignore", "Glyph")
        yield


def _draw_lines(axes: Axes, values: PatchMap, geometry: Geometry, scale: ColourScale) -> None:
    """Draw the outline of half of the evidence, and the frame of the model's input."""
    outline = place_outline(values, geometry, scale)
    for colour, points in (("black", 1.5), ("white", 0.8)):
        lines = LineCollection(outline, colors=colour, linewidths=points, capstyle="projecting")
        axes.add_collection(lines)
    left, top, right, bottom = geometry.box
    if (right - left, bottom - top) != geometry.original_size:
        frame = Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor="white")
        frame.set_linewidth(0.5)
        axes.add_patch(frame)


def _draw_bar(axes: Axes, scale: ColourScale) -> None:
    ramp = np.linspace(scale.high, scale.low, 256, dtype=np.float32)[:, None]
    heat, strength = shade(ramp, scale)
    # the colours that the values have over white
    mask = Image.fromarray((strength * 255).round().astype(np.uint8))
    colours = Image.composite(heat, Image.new("RGB", heat.size, "white"), mask)
    axes.imshow(colours, extent=(0, 1, scale.low, scale.high), aspect="auto")
    middle = [0.0] if scale.low < 0 < scale.high else []
    ends = [scale.low, *middle, scale.high]
    axes.set_xticks([])
    axes.set_yticks(ends, [f"{end:.3g}" for end in ends])
    axes.tick_params(length=2, width=0.5, pad=1)
    axes.yaxis.tick_right()
    axes.yaxis.set_label_position("right")
    axes.set_ylabel("× the average patch", labelpad=1)
    for spine in axes.spines.values():
        spine.set_linewidth(0.5)
