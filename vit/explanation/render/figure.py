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

from matplotlib import rc_context
from matplotlib.figure import Figure
from PIL import Image

from vit.explanation.render.overlay import blend
from vit.explanation.render.page import BADGES
from vit.runtime.files import write_atomically

if TYPE_CHECKING:
    from vit.explanation.records import ImageResult, MapResult

_FONT_POINTS = 6
_ONE_AT_A_TIME = Lock()  # matplotlib's settings hold for all threads
_TILE_INCHES = 2.3  # width of a picture
_CHARACTERS = 47  # in a line of this width
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
    """A picture and what stands below it: a title in bold, a verdict, and a text."""

    picture: Image.Image
    title: str = ""
    verdict: str = ""
    text: str = ""


def save_figure(path: Path, image: "ImageResult", result: "MapResult") -> None:
    """Write the photo, one of its maps and their texts as .svg or .pdf. Equal arguments give equal
    bytes."""
    rows = [_draw_tiles(image, [result])]
    write_atomically(path, partial(_save, rows, kind=path.suffix.lstrip(".")))


def draw_sheet(images: Sequence["ImageResult"]) -> Image.Image:
    """Draw photos, each beside its maps, with what the model predicts and the verdicts."""
    file = io.BytesIO()
    rows = [_draw_tiles(image, image.maps) for image in images]
    _save(rows, file, kind="png", dpi=_SHEET_DPI)
    return Image.open(file).convert("RGB")


def _draw_tiles(image: "ImageResult", results: Sequence["MapResult"]) -> list[Tile]:
    assert image.photo is not None
    tiles = [Tile(image.photo, image.describe_prediction(), text=image.name)]
    for result in results:
        signed = result.method.signed
        picture = blend(image.photo, result.values, image.geometry, signed=signed)
        verdict = ""
        if result.sanity_check is not None:
            verdict = result.sanity_check.verdict
        tiles.append(Tile(picture, "", verdict, result.caption))
    return tiles


def _save(
    rows: Sequence[Sequence[Tile]], file: Path | BinaryIO, *, kind: str, dpi: int = _FIGURE_DPI
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
            bbox_inches="tight",
            metadata={"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind),
        )


def _draw_tile(axes: Any, tile: Tile) -> None:
    axes.imshow(tile.picture)
    verdict, colour = BADGES.get(tile.verdict, ("", ""))
    texts = [
        (tile.title, {"weight": "bold"}),
        (verdict, {"color": "white", "backgroundcolor": colour}),
        (tile.text, {}),
    ]
    y = -4.0
    for text, style in texts:
        if text:
            lines = wrap(text, _CHARACTERS)
            drawn = axes.annotate(
                "\n".join(lines),
                (0, 0),
                (0, y),
                xycoords="axes fraction",
                textcoords="offset points",
                va="top",
            )
            drawn.set(parse_math=False, **style)  # names may have dollar signs
            y -= _FONT_POINTS * 1.3 * len(lines) + 4
