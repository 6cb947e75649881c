"""Text on pictures: lines of a caption, broken and cut by their width."""

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

MARGIN = 8  # pixels
LINE = 19  # height of a line in pixels
_FONT_SIZE = 12


def draw_lines(lines: Sequence[str], width: int) -> Image.Image:
    """Draw lines of text on white."""
    block = Image.new("RGB", (width, LINE * len(lines)), "white")
    for number, line in enumerate(lines):
        block.paste(_draw_line(line), (0, number * LINE))
    return block


# FreeType takes longer than the rest of a picture, and most lines are in the last picture too
@lru_cache(maxsize=256)
def _draw_line(text: str) -> Image.Image:
    line = Image.new("RGB", (math.ceil(measure_text(text)) + MARGIN, LINE), "white")
    ImageDraw.Draw(line).text((0, 0), text, fill="black", font=font())
    return line


@lru_cache(maxsize=1024)
def measure_text(text: str) -> float:
    """Return the width of a text in pixels."""
    return font().getlength(text)


def wrap(text: str, width: int) -> list[str]:
    """Break `text` into lines of at most `width` pixels, between words if possible and never before
    a %."""
    lines = []
    while measure_text(text) > width:
        # the font is proportional, so widths are measured
        fitting = [n for n in range(1, len(text)) if measure_text(text[:n]) <= width]
        end = max(fitting, default=1)
        spaces = [space for space in re.finditer(r" +(?!%)", text) if 0 < space.start() <= end]
        cut, start = spaces[-1].span() if spaces else (end, end)
        lines.append(text[:cut])
        text = text[start:]
    return [*lines, text]


def shorten_text(text: str, width: int) -> str:
    """Cut `text` to `width` pixels, with an ellipsis."""
    shown = text
    while text and measure_text(shown) > width:
        text = text[:-1]
        shown = text + "…"
    return shown


@lru_cache
def font() -> ImageFont.FreeTypeFont:
    """Load the font of captions."""
    # Pillow's own font has neither × nor é; importing matplotlib would take half a second
    spec = find_spec("matplotlib")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "mpl-data/fonts/ttf/DejaVuSans.ttf"
    return ImageFont.truetype(str(path), _FONT_SIZE)
