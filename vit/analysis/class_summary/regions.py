"""Where on the image the relevance lies, compared with maps that are shifted at random."""

import numpy as np
from jaxtyping import Bool, Float

from vit.analysis.class_summary.records import RegionShare
from vit.explanation.capture.tokens import Grid

_NUM_DRAWS = 1000

Maps = Float[np.ndarray, "n rows columns"]
Region = Bool[np.ndarray, "rows columns"]


def find_regions(grid: Grid) -> tuple[Region, Region]:
    """Return the border, an eighth of the height and width on each side, and the centre, the middle
    half of the height and width."""
    border = np.ones(grid, dtype=bool)
    centre = np.zeros(grid, dtype=bool)
    rows, columns = grid
    down = max(round(rows / 8), 1)
    across = max(round(columns / 8), 1)
    border[down : rows - down, across : columns - across] = False
    centre[rows // 4 : rows - rows // 4, columns // 4 : columns - columns // 4] = True
    return border, centre


def shift_maps(maps: Maps, random: np.random.Generator) -> Maps:
    """Shift each map by a random distance of its own, with wrap-around: its shapes stay, its places
    are random."""
    shifts = np.stack([random.integers(side, size=len(maps)) for side in maps.shape[1:]], axis=1)
    return np.stack(
        [np.roll(values, shift, axis=(0, 1)) for values, shift in zip(maps, shifts, strict=True)]
    )


def measure_region(maps: Maps, region: Region, random: np.random.Generator) -> RegionShare:
    """Measure the share of the relevance in a region, for the maps and for shifted ones."""
    # the share of each map after each shift is a circular correlation
    spectrum = np.fft.fft2(maps) * np.conj(np.fft.fft2(region.astype(np.float64)))
    shares = np.fft.ifft2(spectrum).real.reshape(len(maps), -1)  # [n, shifts]
    shifts = random.integers(shares.shape[1], size=(_NUM_DRAWS, len(maps)))
    drawn = shares[np.arange(len(maps)), shifts].mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    share = float(maps[:, region].sum(axis=1).mean())
    return RegionShare(share, float(shares.mean()), float(low), float(high))


def average_patches(masks: Float[np.ndarray, "n H W"], grid: Grid) -> Float[np.ndarray, "n P"]:
    """Compute the mean of each patch."""
    rows, columns = grid
    height = masks.shape[1] // rows
    width = masks.shape[2] // columns
    cut = masks[:, : rows * height, : columns * width]
    tiles = cut.reshape(len(masks), rows, height, columns, width)
    averages: np.ndarray = tiles.mean(axis=(2, 4)).reshape(len(masks), -1)
    return averages
