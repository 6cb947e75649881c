"""Pictures with text, drawn by matplotlib: a map as a figure for a paper, whose text can be edited,
and the contact sheet of many maps."""

import io
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from textwrap import wrap
from threading import Lock
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import torch
from jaxtyping import Float
from matplotlib import rc_context
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from vit.data.images import ImageInput, list_images, read_image
from vit.data.preprocess import Geometry, Preprocess
from vit.explanation.render.overlay import (
    PANEL_SIDES,
    PatchMap,
    blend,
    relative_to_uniform,
    resize_picture,
)
from vit.explanation.render.page import BADGES
from vit.runtime.files import write_atomically

if TYPE_CHECKING:
    from vit.explanation.records import ImageResult, MapResult

_FONT_POINTS = 6
_ONE_AT_A_TIME = Lock()  # matplotlib's settings hold for all threads
_CHARACTER_INCHES = 0.048  # mean width of a character
_TILE_INCHES = 2.3  # width of a picture
_TEXT_INCHES = 1.0  # height of the text below it
_MAX_TILES_ACROSS = 6
_SHEET_DPI = 100
_FIGURE_DPI = 220
_SETTINGS: Any = {
    "font.size": _FONT_POINTS,
    # text stays text in the file; the salt makes its ids the same each time
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "svg.hashsalt": "vit",
}


class Tile(NamedTuple):
    """A picture and what stands below it: a title in bold, the word of a badge, and a text."""

    picture: Image.Image
    title: str = ""
    badge: str | None = None
    text: str = ""


def save_overlay(
    path: str | Path,
    image: ImageInput,
    values: Float[Tensor, "rows columns"] | PatchMap,
    *,
    preprocess: Preprocess | None,
    signed: bool | None = None,
    caption: str = "",
) -> None:
    """Draw one map over one image, and write a picture of the image and its heat
    map.

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
    geometry = Geometry(photo.size, box=(0.0, 0.0, float(photo.width), float(photo.height)))
    if preprocess is not None:
        photo = preprocess.to_rgb(photo)
        geometry = preprocess.geometry(photo.size)
    array = relative_to_uniform(torch.as_tensor(values).detach().float().cpu().numpy())
    if signed is None:
        signed = bool((array < 0).any())
    photo = resize_picture(photo, min_side=PANEL_SIDES[0], max_side=PANEL_SIDES[1])
    drawn = Tile(blend(photo, array, geometry, signed=signed), text=caption)
    # the temporary file has another suffix, so the format is named
    kind = Path(path).suffix.lower().lstrip(".") or "png"
    write_atomically(Path(path), partial(_save, [[Tile(photo), drawn]], kind=kind))


def save_figure(path: Path, image: "ImageResult", result: "MapResult", *, kind: str) -> None:
    """Write the photo, one of its maps and their texts as "svg" or "pdf". Equal arguments give
    equal bytes."""
    photo, drawn = _draw_tiles(image, [result])
    write_atomically(path, partial(_save, [[photo, drawn]], kind=kind))


def draw_sheet(images: Sequence["ImageResult"]) -> Image.Image:
    """Draw photos, each beside its maps, with what the model predicts and the verdicts."""
    file = io.BytesIO()
    _save([_draw_tiles(image, image.maps) for image in images], file, kind="png", is_sheet=True)
    return Image.open(file).convert("RGB")


def _draw_tiles(image: "ImageResult", results: Sequence["MapResult"]) -> list[Tile]:
    assert image.photo is not None
    tiles = [Tile(image.photo, image.describe_prediction(), None, image.title)]
    for result in results:
        picture = blend(
            image.photo, result.shown_values, image.geometry, signed=result.method.signed
        )
        check = result.sanity_check
        tiles.append(Tile(picture, "", check.verdict if check else None, result.caption))
    return tiles


def _save(
    rows: Sequence[Sequence[Tile]], file: Path | BinaryIO, *, kind: str, is_sheet: bool = False
) -> None:
    """Write rows of tiles. Rows of few tiles are side by side."""
    tiles = max(map(len, rows))
    across = min(max(_MAX_TILES_ACROSS // tiles, 1), len(rows))
    num_lines = -(-len(rows) // across)
    # as high as the highest picture
    shapes = [tile.picture.height / tile.picture.width for row in rows for tile in row]
    height = num_lines * (min(max(shapes), 2) * _TILE_INCHES + _TEXT_INCHES)
    size = (across * tiles * _TILE_INCHES, height)
    with _ONE_AT_A_TIME, rc_context(_SETTINGS), warnings.catch_warnings():
        # a name may have characters that the font lacks
        warnings.filterwarnings("ignore", "Glyph")
        # a figure has no space around it; a sheet's size is known without its text
        dpi = _FIGURE_DPI
        box: str | None = "tight"
        if is_sheet:
            dpi, box = _SHEET_DPI, None
        figure = Figure(figsize=size, dpi=dpi, layout="constrained")
        grid = figure.subplots(num_lines, across * tiles, squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for number, row in enumerate(rows):
            for place, tile in enumerate(row, start=number % across * tiles):
                _draw_tile(grid[number // across, place], tile)
        figure.savefig(
            file,
            format=kind,
            bbox_inches=box,
            metadata={"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind),
        )


def _draw_tile(axes: Any, tile: Tile) -> None:
    axes.imshow(tile.picture)
    texts: list[tuple[str, dict[str, str]]] = [(_wrap(tile.title), {"weight": "bold"})]
    if tile.badge is not None:
        text, colour = BADGES[tile.badge]
        texts.append((text, {"color": "white", "backgroundcolor": colour}))
    texts.append((_wrap(tile.text), {}))
    y = -4.0
    for text, style in texts:
        if text:
            drawn = axes.annotate(
                text, (0, 0), (0, y), xycoords="axes fraction", textcoords="offset points", va="top"
            )
            drawn.set(parse_math=False, **style)  # names may have dollar signs
            y -= (_FONT_POINTS * 1.3) * (text.count("\n") + 1) + 4


def _wrap(text: str) -> str:
    return "\n".join(wrap(text, int(_TILE_INCHES / _CHARACTER_INCHES)))
