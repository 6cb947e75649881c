"""Places on the images: regions, compared with maps that are shifted at random, and marks, which are
the same picture at the same place in several images, such as a watermark."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, UInt8

from vit.analysis.class_summary.passes import PatchMask
from vit.analysis.class_summary.records import RegionShare
from vit.explanation.capture.tokens import Grid
from vit.prediction.probabilities import Ints

MAX_IMAGES_A_CLASS = 200
# on fewer patches nothing is off the centre: every object is at the same place
MIN_PATCHES = 36
# mean correlation of pixels above which patches of different images are the same picture
SAME_PICTURE = 0.9
# images that show the same picture at the same place: a sign test of fewer has no p-value below 5 %
_MIN_SAME_PICTURE = 5
# images whose patches are compared
_MAX_COMPARED = 50
# a patch shows the same picture where its pixels vary by less than this share of the variance in
# other images
_SAME_VARIANCE = 0.25
# random shifts of the maps with which a region is compared
_NUM_DRAWS = 1000

Maps = Float[np.ndarray, "n rows columns"]
Region = Bool[np.ndarray, "rows columns"]


@dataclass(frozen=True)
class Pictures:
    """The pixels of the images, as the model sees them, and the random numbers that choose among
    their patches."""

    pixels: UInt8[np.ndarray, "n H W 3"]
    grid: Grid
    random: np.random.Generator

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return self.grid[0] * self.grid[1]

    def measure_likeness(self, indices: Ints, members: PatchMask) -> float:
        """Mean correlation between the pixels of a random member in each image; 0 for one image."""
        if len(indices) < 2:
            return 0.0
        cut = []
        for image, image_members in zip(indices[:_MAX_COMPARED], members, strict=False):
            patch = int(self.random.choice(np.flatnonzero(image_members)))
            cut.append(cut_patch(self.pixels[image], patch, self.grid).ravel())
        values = np.stack(cut).astype(np.float64)
        values -= values.mean(axis=1, keepdims=True)
        lengths = np.linalg.norm(values, axis=1, keepdims=True)
        units = values / np.maximum(lengths, 1e-9)
        correlations = units @ units.T
        return float(correlations[np.triu_indices(len(units), k=1)].mean())

    def find_place(self, indices: Ints, members: PatchMask) -> int | None:
        """Find the patch off the centre at which most images have a cluster, if they show the same
        picture there."""
        _, centre = find_regions(self.grid)
        counts = np.where(centre.ravel(), 0, members.sum(axis=0))
        place = int(counts.argmax())
        if self.num_patches < MIN_PATCHES or counts[place] < _MIN_SAME_PICTURE:
            return None
        chosen = np.flatnonzero(members[:, place])
        at_place = np.zeros((len(chosen), self.num_patches), dtype=bool)
        at_place[:, place] = True
        likeness = self.measure_likeness(indices[chosen], at_place)
        return place if likeness >= SAME_PICTURE else None

    def find_extent(self, indices: Ints) -> Bool[np.ndarray, " P"]:
        """Find the patches whose pixels vary little between these images, compared with others of
        any class."""
        others = np.delete(np.arange(len(self.pixels)), indices)
        if len(indices) < 2 or len(others) < 2:
            return np.zeros(self.num_patches, dtype=bool)
        variances = [
            self.pixels[chosen[:MAX_IMAGES_A_CLASS]].astype(np.float32).var(axis=0).mean(-1)
            for chosen in (indices, self.random.permutation(others))
        ]
        here, elsewhere = average_patches(np.stack(variances), self.grid)
        return np.asarray(here < _SAME_VARIANCE * elsewhere)

    def separate_marks(
        self,
        indices: Ints,
        assigned: Ints,
        other_assigned: Sequence[Ints],
        num_clusters: int,
    ) -> int:
        """Give marks clusters of their own, numbered from `num_clusters` on, and count them.

        Marks and parts of the object may look alike to the model, so that one cluster joins both.
        Or each patch of a mark looks different, so that the mark is in many clusters.

        Args:
            indices: The images in which marks are looked for.
            assigned: The cluster of each of their patches, changed in place.
            other_assigned: The same for other images.
            num_clusters: Clusters before marks are separated.
        """
        num_marks = 0
        for number in range(num_clusters):
            place = self.find_place(indices, assigned == number)
            if place is None:
                continue
            extent = self.find_extent(indices[assigned[:, place] == number])
            extent[place] = True
            for clusters in (assigned, *other_assigned):
                has_mark = clusters[:, [place]] == number
                clusters[has_mark & extent] = num_clusters + num_marks
            num_marks += 1
        return num_marks


def cut_patch(
    pixels: UInt8[np.ndarray, "H W 3"], patch: int, grid: Grid
) -> UInt8[np.ndarray, "h w 3"]:
    """Return the pixels of a patch."""
    rows, columns = grid
    height = pixels.shape[0] // rows
    width = pixels.shape[1] // columns
    row, column = divmod(patch, columns)
    return pixels[row * height : (row + 1) * height, column * width : (column + 1) * width]


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
