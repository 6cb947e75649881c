"""Pictures with text, drawn by matplotlib: figures for papers, and the contact sheet of many
maps."""

import io
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, BinaryIO

from matplotlib import rc_context
from matplotlib.figure import Figure
from PIL import Image

from vit.explanation.render.overlay import blend
from vit.explanation.render.page import BADGES
from vit.runtime.files import write_atomically

if TYPE_CHECKING:
    from vit.explanation.records import ImageResult, MapResult

_FONT_POINTS = 6
_TILE_INCHES = 2.3  # width of a picture
_CHARACTERS = 47  # in a line of this width
_TEXT_INCHES = 1.0  # height of the texts above and below it
_MAX_TILES_ACROSS = 6
_PICTURE_DPI = {"png": 100, "svg": 220, "pdf": 220}
_SETTINGS: Any = {
    "font.size": _FONT_POINTS,
    "axes.titlesize": _FONT_POINTS,
    "axes.titlelocation": "left",
    "text.parse_math": False,  # names may have dollar signs
    # text can be edited; the salt makes the file's ids the same each time
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "svg.hashsalt": "vit",
}


# a picture, the title above it with its style, and the text below it
Tile = tuple[Image.Image, str, dict[str, str], str]


def save_figure(path: Path, image: "ImageResult", result: "MapResult") -> None:
    """Write the photo, one of its maps and their texts as .svg or .pdf."""
    rows = [_draw_tiles(image, [result])]
    write_atomically(path, partial(_save, rows, kind=path.suffix.lstrip(".")))


def draw_sheet(images: Sequence["ImageResult"]) -> Image.Image:
    """Draw photos, each beside its maps, with what the model predicts and the verdicts."""
    file = io.BytesIO()
    _save([_draw_tiles(image, image.maps) for image in images], file, kind="png")
    return Image.open(file).convert("RGB")


def _draw_tiles(image: "ImageResult", results: Sequence["MapResult"]) -> list[Tile]:
    assert image.photo is not None
    tiles: list[Tile] = [(image.photo, image.describe_prediction(), {"weight": "bold"}, image.name)]
    for result in results:
        signed = result.method.signed
        picture = blend(image.photo, result.values, image.geometry, signed=signed)
        verdict, style = "", {}
        if result.sanity_check is not None:
            verdict, colour = BADGES[result.sanity_check.verdict]
            style = {"color": "white", "backgroundcolor": colour}
        tiles.append((picture, verdict, style, result.caption))
    return tiles


def _save(rows: Sequence[Sequence[Tile]], file: Path | BinaryIO, *, kind: str) -> None:
    """Write rows of tiles. Rows of few tiles are side by side."""
    tiles = max(map(len, rows))
    across = min(max(_MAX_TILES_ACROSS // tiles, 1), len(rows))
    num_lines = -(-len(rows) // across)
    # as high as the highest picture
    shapes = [picture.height / picture.width for row in rows for picture, *_ in row]
    height = num_lines * (min(max(shapes), 2) * _TILE_INCHES + _TEXT_INCHES)
    size = (across * tiles * _TILE_INCHES, height)
    with rc_context(_SETTINGS), warnings.catch_warnings():
        # a name may have characters that the font lacks
        warnings.filterwarnings("ignore", "Glyph")
        figure = Figure(figsize=size, dpi=_PICTURE_DPI[kind], layout="constrained")
        grid = figure.subplots(num_lines, across * tiles, squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for number, row in enumerate(rows):
            for place, tile in enumerate(row, start=number % across * tiles):
                picture, title, style, text = tile
                axes = grid[number // across, place]
                axes.imshow(picture)
                axes.set_title(fill(title, _CHARACTERS), **style)
                axes.annotate(
                    fill(text, _CHARACTERS),
                    (0, 0),
                    (0, -_FONT_POINTS),
                    xycoords="axes fraction",
                    textcoords="offset points",
                    va="top",
                )
        figure.savefig(
            file,
            format=kind,
            bbox_inches="tight",
            metadata={"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind),
        )
