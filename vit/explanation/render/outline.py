"""The lines on a map: around the patches that hold half of the evidence, and around the part of the
photo that the model saw."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from jaxtyping import Bool
from PIL import Image, ImageDraw

from vit.data.preprocess import Geometry
from vit.explanation.render.scale import ColourScale, PatchMap

# (x, y) of the ends of a line
Line = tuple[tuple[float, float], tuple[float, float]]
# evidence that is spread over more than this fraction of the patches has no outline
_MAX_OUTLINED = 0.4
_PIXELS_PER_WIDTH = 160  # pixels of a picture's longer side for each pixel of a line's width


def find_half(values: PatchMap) -> Bool[np.ndarray, "rows columns"]:
    """Find the fewest patches that hold half of the evidence, which is the sum of the positive
    values."""
    evidence = np.clip(values, 0, None).astype(np.float64).ravel()
    most_first = np.argsort(-evidence, kind="stable")
    held = evidence[most_first].cumsum()
    half = np.zeros(values.size, dtype=bool)
    if held[-1] > 0:
        half[most_first[: 1 + np.searchsorted(held, held[-1] / 2)]] = True
    return half.reshape(values.shape)


def find_outlined(values: PatchMap, scale: ColourScale) -> Bool[np.ndarray, "rows columns"]:
    """Find the patches that get an outline: those that hold half of the evidence; none for a map
    that is drawn flat, nor for evidence that is spread over the image."""
    half = find_half(values)
    if scale.is_flat or half.mean() > _MAX_OUTLINED:
        return np.zeros_like(half)
    return half


def trace_outline(values: PatchMap, geometry: Geometry, scale: ColourScale) -> list[Line]:
    """Return the lines around the patches that get an outline, in pixels of the upright
    original."""
    half = find_outlined(values, scale)
    left, top, right, bottom = geometry.box
    rows, columns = half.shape
    x = np.linspace(left, right, columns + 1).tolist()
    y = np.linspace(top, bottom, rows + 1).tolist()
    lines: list[Line] = [
        ((x[column], y[start]), (x[column], y[stop])) for column, start, stop in _find_edges(half.T)
    ]
    lines += [((x[start], y[row]), (x[stop], y[row])) for row, start, stop in _find_edges(half)]
    return lines


def _find_edges(half: Bool[np.ndarray, "rows columns"]) -> Iterator[tuple[int, int, int]]:
    """Yield each edge between rows, 0 to the number of rows, with its first and last column."""
    for row, changes in enumerate(np.diff(np.pad(half, 1).astype(np.int8), axis=0)[:, 1:-1]):
        # the next line begins where one ends, so that corners are closed
        ends = np.flatnonzero(np.diff(np.pad(changes, 1))).tolist()
        for start, stop in pairwise(ends):
            if changes[start]:
                yield row, start, stop


def draw_lines_of_map(
    picture: Image.Image, values: PatchMap, geometry: Geometry, *, scale: ColourScale
) -> None:
    """Draw the outline of half of the evidence and the frame of the model's input on a picture of
    the whole upright original."""
    across, down = (
        side / original for side, original in zip(picture.size, geometry.original_size, strict=True)
    )
    draw = ImageDraw.Draw(picture)
    width = max(round(max(picture.size) / _PIXELS_PER_WIDTH), 1)
    lines = [
        [(x * across, y * down) for x, y in line] for line in trace_outline(values, geometry, scale)
    ]
    # white on black, so that it is seen on any photo
    for colour, thickness in (("black", width + 2), ("white", width)):
        for line in lines:
            draw.line(line, fill=colour, width=thickness)
    left, top, right, bottom = geometry.box
    frame = (left * across, top * down, right * across - 1, bottom * down - 1)
    if frame != (0, 0, picture.width - 1, picture.height - 1):
        draw.rectangle([frame[0] - 1, frame[1] - 1, frame[2] + 1, frame[3] + 1], outline="white")
