"""The contact sheet: one picture with rows of a photo and its maps, and text below each."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import NamedTuple

from PIL import Image, ImageDraw

from vit.explanation.render.text import MARGIN, draw_lines, wrap

MAX_SHEET_IMAGES = 24
_TILE = 232  # pixels, the longer side of a picture
_MAX_TILES_ACROSS = 6


class SheetRow(NamedTuple):
    """A photo and its maps, with the lines of text below each."""

    pictures: Sequence[Image.Image]
    texts: Sequence[Sequence[str]]


def draw_contact_sheet(rows: Sequence[SheetRow]) -> Image.Image:
    """Draw rows of pictures with their texts; rows of few pictures are side by side."""
    tiles = max(len(row.pictures) for row in rows)
    # rows have the width of the widest one, so that they are aligned
    columns = min(max(_MAX_TILES_ACROSS // tiles, 1), len(rows))
    with ThreadPoolExecutor() as pool:
        drawn = list(pool.map(_draw_row, rows, repeat(tiles)))
    lines = [drawn[start : start + columns] for start in range(0, len(drawn), columns)]
    # rows next to each other have different numbers of lines below them
    heights = [max(row.height for row in line) for line in lines]

    sheet = Image.new("RGB", (columns * drawn[0].width + MARGIN, sum(heights) + MARGIN), "white")
    top = MARGIN
    for line, height in zip(lines, heights, strict=True):
        for column, row in enumerate(line):
            sheet.paste(row, (column * row.width + MARGIN, top))
        top += height
    return sheet


def _draw_row(row: SheetRow, tiles: int) -> Image.Image:
    pictures = []
    for picture in row.pictures:
        scaling = _TILE / max(picture.size)
        width, height = (max(math.floor(side * scaling), 1) for side in picture.size)
        pictures.append(picture.resize((width, height), Image.Resampling.LANCZOS))
    texts = []
    for lines in row.texts:
        texts.append([part for line in lines for part in wrap(line, _TILE)])
    picture_height = max(picture.height for picture in pictures)
    text = [draw_lines(lines, _TILE + MARGIN) for lines in texts]
    height = picture_height + MARGIN // 2 + max(block.height for block in text) + 2 * MARGIN

    drawn = Image.new("RGB", (tiles * (_TILE + MARGIN) + MARGIN, height), "white")
    for number, (picture, block) in enumerate(zip(pictures, text, strict=True)):
        left = number * (_TILE + MARGIN)
        drawn.paste(picture, (left, 0))
        # a frame, because a white photo has no edge
        frame = (left, 0, left + picture.width - 1, picture.height - 1)
        ImageDraw.Draw(drawn).rectangle(frame, outline="silver")
        drawn.paste(block, (left, picture_height + MARGIN // 2))
    return drawn
