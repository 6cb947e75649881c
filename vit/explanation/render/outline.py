"""The line around the patches that hold half of the evidence."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from jaxtyping import Bool

from vit.explanation.render.scale import ColourScale, PatchMap

# (x, y) of the ends of a line, in patches from the upper left corner
Line = tuple[tuple[int, int], tuple[int, int]]
# evidence that is spread over more than this fraction of the patches has no outline
_MAX_OUTLINED = 0.4


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


def trace_outline(values: PatchMap, scale: ColourScale) -> list[Line]:
    """Return the lines around the patches that hold half of the evidence; none for a map that is
    drawn flat, nor for evidence that is spread over the image."""
    half = find_half(values)
    if scale.is_flat or half.mean() > _MAX_OUTLINED:
        return []
    lines: list[Line] = [((x, top), (x, bottom)) for x, top, bottom in _find_edges(half.T)]
    return lines + [((left, y), (right, y)) for y, left, right in _find_edges(half)]


def _find_edges(half: Bool[np.ndarray, "rows columns"]) -> Iterator[tuple[int, int, int]]:
    """Yield each edge between rows, 0 to the number of rows, with its first and last column."""
    for row, changes in enumerate(np.diff(np.pad(half, 1).astype(np.int8), axis=0)[:, 1:-1]):
        # the next line begins where one ends, so that corners are closed
        ends = np.flatnonzero(np.diff(np.pad(changes, 1))).tolist()
        for start, stop in pairwise(ends):
            if changes[start]:
                yield row, start, stop
