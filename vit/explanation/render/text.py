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


def draw_lines(lines: Sequence[str], width: int, *, bold: bool = False) -> Image.Image:
    """Draw lines of text on white."""
    block = Image.new("RGB", (width, LINE * len(lines)), "white")
    for number, line in enumerate(lines):
        block.paste(_draw_line(line, bold=bold), (0, number * LINE))
    return block


# FreeType takes longer than the rest of a picture, and most lines are in the last picture too
@lru_cache(maxsize=256)
def _draw_line(text: str, *, bold: bool) -> Image.Image:
    line = Image.new("RGB", (math.ceil(measure_text(text, bold=bold)) + MARGIN, LINE), "white")
    ImageDraw.Draw(line).text((0, 0), text, fill="black", font=font(bold=bold))
    return line


@lru_cache(maxsize=64)
def draw_badge(text: str, colour: str) -> Image.Image:
    """Draw white text on a rounded rectangle of a colour."""
    width = math.ceil(measure_text(text, bold=True)) + 2 * MARGIN
    badge = Image.new("RGB", (width, LINE + 6), "white")
    draw = ImageDraw.Draw(badge)
    draw.rounded_rectangle((0, 2, width - 1, LINE + 2), radius=5, fill=colour)
    draw.text((MARGIN, 4), text, fill="white", font=font(bold=True))
    return badge


@lru_cache(maxsize=1024)
def measure_text(text: str, *, bold: bool = False) -> float:
    """Return the width of a text in pixels."""
    return font(bold=bold).getlength(text)


def wrap(text: str, width: int, *, bold: bool = False) -> list[str]:
    """Break `text` into lines of at most `width` pixels, between words if possible and never before
    a %."""
    lines = []
    while measure_text(text, bold=bold) > width:
        # the font is proportional, so widths are measured
        fitting = [n for n in range(1, len(text)) if measure_text(text[:n], bold=bold) <= width]
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
def font(*, bold: bool = False) -> ImageFont.FreeTypeFont:
    """Load the font of captions."""
    # Pillow's own font has neither × nor é; importing matplotlib would take half a second
    spec = find_spec("matplotlib")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / f"mpl-data/fonts/ttf/DejaVuSans{'-Bold' if bold else ''}.ttf"
    return ImageFont.truetype(str(path), _FONT_SIZE)
