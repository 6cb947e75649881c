"""Duplicates and near-duplicates between sets, by hashes of pixels and perceptual hashes; traces of JPEG."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from PIL import Image

Hashes = tuple[np.ndarray, np.ndarray]  # digests, perceptual hashes: uint64 [n]
NEAR = 4  # bits of 64 by which near-duplicates may differ
_FLAT = 8  # hashes with fewer bits set or unset are of flat images, which are all similar
_MOST_EQUAL = 3  # bands: 35 sorted lists at 4 bits
_PAIRS = 1 << 22  # candidates compared at once: 32 MiB a temporary
_CIFAR10 = frozenset("airplane automobile bird cat deer dog frog horse ship truck".split())  # noqa: SIM905


def hash_pixels(image: Image.Image) -> int:
    """64 bits of the sha256 of an RGB image's size and pixels."""
    digest = hashlib.sha256(f"{image.width}x{image.height}:".encode())
    digest.update(image.tobytes())
    return int.from_bytes(digest.digest()[:8], "little")


def compute_dhash(image: Image.Image) -> int:
    """64-bit difference hash (dHash) of an RGB image, hardly changed by recoding, rescaling and small crops.

    32 bits say whether a cell of a 4×8 grey grid is brighter than its left neighbour, 32 whether one of an
    8×4 grid is brighter than the one above. Below 16 pixels it is 0, which `find_duplicates` ignores: of the
    8×8 digits, half the test images would resemble a training image.
    """
    if min(image.size) < 16:
        return 0
    grey = image.convert("L")
    across = np.asarray(grey.resize((9, 4), Image.Resampling.BOX))
    down = np.asarray(grey.resize((4, 9), Image.Resampling.BOX))
    bits = np.concatenate([(across[:, 1:] > across[:, :-1]).ravel(), (down[1:] > down[:-1]).ravel()])
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


@dataclass(frozen=True, eq=False)
class Duplicates:
    """Pairs [m, 2] of (index among the queries, index in the training set), at most one a query."""

    exact: np.ndarray  # same pixels
    near: np.ndarray  # other pixels, the closest perceptual hash
    near_distance: np.ndarray  # bits that differ, [len(near)]


def find_duplicates(hashes: Hashes, training_hashes: Hashes, *, max_distance: int = NEAR) -> Duplicates:
    """Find images that were in training; each argument is (digests, perceptual hashes).

    Exact pairs are certain, near ones are suspects. Of the 10,000 test images of CIFAR-10 (JPEG copy) 100 have a near
    pair among the training images at 4 bits; 99 of those have the same label, and 23 of 24 examined were the same
    picture. Of planted copies 94 % recoded at JPEG quality 40 are found, all rescaled ones, and half of those cropped
    by a pixel. Images so flat that their hashes are nearly all zeros or ones are compared by their pixels alone.
    """
    (digests, dhashes), (training_digests, training_dhashes) = hashes, training_hashes
    order = np.argsort(training_digests, kind="stable")
    place = np.searchsorted(training_digests[order], digests)
    candidate = order[np.minimum(place, len(order) - 1)] if len(order) else np.zeros(len(digests), np.int64)
    same = training_digests[candidate] == digests if len(order) else np.zeros(len(digests), bool)
    exact = np.flatnonzero(same)
    queries = np.flatnonzero(~same & _is_distinctive(dhashes))
    # images of one hash are compared once, so that many copies of a few take no longer than the few
    of_queries, which = np.unique(dhashes[queries], return_inverse=True)
    of_training, first = np.unique(training_dhashes, return_index=True)  # the first image of each hash
    kept = _is_distinctive(of_training)
    of_training, first = of_training[kept], first[kept]
    best = np.full(len(of_queries), (max_distance + 1) << 48)  # distance and, in the lower bits, training index
    for query, other, distance in _close_pairs(of_queries, of_training, max_distance):
        np.minimum.at(best, query, (distance << 48) + first[other])
    best = best[which]
    near = np.flatnonzero(best >> 48 <= max_distance)
    exact_pairs, near_pairs = (
        np.stack([exact, candidate[exact]], axis=1),
        np.stack([queries[near], best[near] & ((1 << 48) - 1)], axis=1),
    )
    return Duplicates(exact_pairs, near_pairs, near_distance=best[near] >> 48)


def _is_distinctive(dhashes: np.ndarray) -> np.ndarray:
    ones = np.bitwise_count(dhashes)
    distinctive: np.ndarray = (ones >= _FLAT) & (ones <= 64 - _FLAT)
    return distinctive


def _close_pairs(queries: np.ndarray, training: np.ndarray, max_distance: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Runs of (query, training index, distance ≤ max_distance); a pair may come several times.

    Of max_distance + k bands of the 64 bits at least k are equal in every such pair (pigeonhole), so only images with k
    bands in common are compared (Manku, Jain & Das Sarma 2007). More images take larger k: with 2^b images and b equal
    bits, each is compared with about one other by chance, however many there are.
    """
    num_equal = 1
    while 64 * num_equal // (max_distance + num_equal) < len(training).bit_length() and num_equal < _MOST_EQUAL:
        num_equal += 1
    edges = np.linspace(0, 64, max_distance + num_equal + 1).astype(int)
    bands = [(1 << high) - (1 << low) for low, high in pairwise(edges.tolist())]
    for equal in combinations(bands, num_equal):
        band = np.uint64(sum(equal))
        order = np.argsort(training & band, kind="stable")
        sorted_band = (training & band)[order]
        in_order = np.argsort(queries & band)  # a search for sorted values stays in the cache
        wanted = (queries & band)[in_order]
        start = np.searchsorted(sorted_band, wanted, side="left")
        count = np.searchsorted(sorted_band, wanted, side="right") - start
        total = np.concatenate([[0], np.cumsum(count)])
        # pair number p belongs to the query whose span of `total` holds p
        for first in range(0, int(total[-1]), _PAIRS):
            pair = np.arange(first, min(first + _PAIRS, int(total[-1])))
            place = np.searchsorted(total, pair, side="right") - 1
            query, other = in_order[place], order[start[place] + pair - total[place]]
            distance = np.bitwise_count(queries[query] ^ training[other]).astype(np.int64)
            close = distance <= max_distance
            if close.any():
                yield query[close], other[close], distance[close]


def jpeg_note(class_names: tuple[str, ...], images: Iterable[Image.Image]) -> str | None:
    """A sentence when a sample of 32×32 images was JPEG-encoded, as the well-known copy of CIFAR-10 is.

    JPEG sets high frequencies of 8×8 blocks on its grid to zero, so the fraction of smooth blocks is compared with that
    of blocks half a step off it: at quality 75 they differ by 0.6, at 95 by 0.1, without JPEG by 0.04.
    """
    planes = []
    for image in images:
        if image.size != (32, 32):
            return None
        planes.append(np.asarray(image.convert("L"), dtype=np.float32))
    grey = np.array(planes)
    if not planes or _smooth_fraction(grey) - _smooth_fraction(grey[:, 4:28, 4:28]) < 0.15:
        return None
    name = "CIFAR-10 (JPEG copy)" if set(class_names) == _CIFAR10 else "JPEG-encoded 32×32 images"
    return f"{name}: not comparable with results on the original pixels"


def _smooth_fraction(grey: np.ndarray) -> float:
    """Fraction of 8×8 blocks of [n, H, W] without high frequencies in both directions."""
    from scipy.fft import dctn

    n, height, width = grey.shape
    blocks = grey.reshape(n, height // 8, 8, width // 8, 8).swapaxes(2, 3).reshape(-1, 8, 8)
    high = dctn(blocks, axes=(1, 2), norm="ortho")[:, 4:, 4:]
    return float((np.abs(high).max(axis=(1, 2)) < 2).mean())
