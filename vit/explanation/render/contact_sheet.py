"""The contact sheet: one picture with rows of a photo and its maps, and text below each."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import NamedTuple

from PIL import Image, ImageDraw

from vit.explanation.render.text import MARGIN, draw_badge, draw_lines, wrap

MAX_SHEET_IMAGES = 24
_TILE = 232  # pixels, the longer side of a picture
_MAX_TILES_ACROSS = 6
# text of each badge, and its colour, which is dark enough for white text; the gallery has the same
BADGES = {
    "confirmed": ("✓ map confirmed", "#15703a"),
    "partly confirmed": ("~ map partly confirmed", "#8a5a00"),
    "not confirmed": ("✗ map not confirmed", "#a02020"),
    "not tested": ("– map not tested", "#555555"),
    "unusual": ("! unusual", "#6a3fb5"),
    "unsure": ("? unsure", "#8a5a00"),
}
_LEGEND = (
    "On a map, the thin frame is around the part of the photo that the model saw, and the thick line"
    " around the patches that hold half of what the map shows (blue doesn't count). Attention is"
    " yellow where it is highest. The badge of a map isn't about the answer: does the class or"
    " label lose probability without the patches that the map ranks first?"
)


class Tile(NamedTuple):
    """A picture and what stands below it: a title in bold, the word of a badge, and lines."""

    picture: Image.Image
    title: str
    badge: str | None
    lines: Sequence[str]


def draw_contact_sheet(rows: Sequence[Sequence[Tile]]) -> Image.Image:
    """Draw rows of a photo and its maps; rows of few pictures are side by side."""
    tiles = max(len(row) for row in rows)
    # rows have the width of the widest one, so that they are aligned
    columns = min(max(_MAX_TILES_ACROSS // tiles, 1), len(rows))
    with ThreadPoolExecutor() as pool:
        drawn = list(pool.map(_draw_row, rows, repeat(tiles)))
    lines = [drawn[start : start + columns] for start in range(0, len(drawn), columns)]
    # rows next to each other have different numbers of lines below them
    heights = [max(row.height for row in line) for line in lines]

    width = columns * drawn[0].width + MARGIN
    legend = draw_lines(wrap(_LEGEND, width - 3 * MARGIN), width - 2 * MARGIN)
    height = sum(heights) + legend.height + 2 * MARGIN
    sheet = Image.new("RGB", (width, height), "white")
    top = MARGIN
    for line, line_height in zip(lines, heights, strict=True):
        for column, row in enumerate(line):
            sheet.paste(row, (column * row.width + MARGIN, top))
        top += line_height
    sheet.paste(legend, (MARGIN, top))
    return sheet


def _draw_row(row: Sequence[Tile], tiles: int) -> Image.Image:
    pictures = []
    texts = []
    for tile in row:
        scaling = _TILE / max(tile.picture.size)
        width, height = (max(math.floor(side * scaling), 1) for side in tile.picture.size)
        pictures.append(tile.picture.resize((width, height), Image.Resampling.LANCZOS))
        texts.append(_draw_text(tile))
    picture_height = max(picture.height for picture in pictures)
    height = picture_height + MARGIN // 2 + max(text.height for text in texts) + 2 * MARGIN

    drawn = Image.new("RGB", (tiles * (_TILE + MARGIN) + MARGIN, height), "white")
    for number, (picture, text) in enumerate(zip(pictures, texts, strict=True)):
        left = number * (_TILE + MARGIN)
        drawn.paste(picture, (left, 0))
        # a frame, because a white photo has no edge
        frame = (left, 0, left + picture.width - 1, picture.height - 1)
        ImageDraw.Draw(drawn).rectangle(frame, outline="silver")
        drawn.paste(text, (left, picture_height + MARGIN // 2))
    return drawn


def _draw_text(tile: Tile) -> Image.Image:
    """Draw what stands below a picture."""
    width = _TILE + MARGIN
    blocks: list[Image.Image] = []
    if tile.title:
        blocks.append(draw_lines(wrap(tile.title, _TILE, bold=True), width, bold=True))
    if tile.badge is not None:
        blocks.append(draw_badge(*BADGES[tile.badge]))
    blocks.append(draw_lines([part for line in tile.lines for part in wrap(line, _TILE)], width))
    text = Image.new("RGB", (width, sum(block.height for block in blocks)), "white")
    top = 0
    for block in blocks:
        text.paste(block, (0, top))
        top += block.height
    return text
