"""Duplicates and near-duplicates between sets of images, by hashes of pixels and perceptual
hashes."""

import hashlib
from typing import NamedTuple

import numpy as np
from PIL import Image

from vit.data.images import divide

# bits of 64 by which near-duplicates may differ
NEAR = 6
# hashes with fewer bits set or unset are of flat images, which are all similar
_FLAT = 8
# pixels: of smaller images, many of one class have equal hashes
_MIN_SIDE = 16
# at which the search in one set ends: of k copies there are k (k - 1) / 2 pairs
_MAX_PAIRS = 10_000
# pairs compared at once: 16 MiB a temporary, which stays in the cache
_BLOCK = 1 << 21


def hash_pixels(image: Image.Image) -> int:
    """64 bits of the sha256 of an RGB image's size and pixels."""
    digest = hashlib.sha256(f"{image.width}x{image.height}:".encode())
    for _, band in divide(image):
        digest.update(band.tobytes())
    return int.from_bytes(digest.digest()[:8], "little")


def compute_dhash(image: Image.Image) -> int:
    """64-bit difference hash (dHash) of an RGB image, hardly changed by recoding, rescaling and
    small crops.

    32 bits say whether a cell of a 4×8 grey grid is brighter than its left neighbour, 32 whether
    one of an 8×4 grid is brighter than the one above. Below 16 pixels it is 0, which
    `find_duplicates` ignores: of the 8×8 digits, half the test images would resemble a training
    image.
    """
    if min(image.size) < _MIN_SIDE:
        return 0
    grey = image.convert("L")
    across = np.asarray(grey.resize((9, 4), Image.Resampling.BOX))
    down = np.asarray(grey.resize((4, 9), Image.Resampling.BOX))
    is_brighter = [across[:, 1:] > across[:, :-1], down[1:] > down[:-1]]
    bits = np.concatenate([part.ravel() for part in is_brighter])
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


class Duplicates(NamedTuple):
    """Pairs [m, 2] of (index among the queries, index in the training set), at most one a query."""

    # same pixels
    exact: np.ndarray
    # other pixels, the closest perceptual hash
    near: np.ndarray


def find_duplicates(
    hashes: np.ndarray, training_hashes: np.ndarray, *, max_distance: int = NEAR
) -> Duplicates:
    """Find images that were in training, also mirrored.

    Exact pairs are certain, near ones are suspects; docs/data.md says how many planted copies are
    found. Images so flat that their hashes are nearly all zeros or ones are compared by their
    pixels alone.

    Args:
        hashes: uint64 [2, n], `hash_pixels` and `compute_dhash` of each image that is looked for.
        training_hashes: uint64 [2, m], of those in training.
        max_distance: bits by which the perceptual hashes of a near pair may differ.
    """
    digests, dhashes = hashes
    training_digests, training_dhashes = training_hashes

    # same pixels: the first training image that has them
    is_exact = np.isin(digests, training_digests)
    exact = np.flatnonzero(is_exact)
    unique_digests, first_indices = np.unique(training_digests, return_index=True)
    places = np.searchsorted(unique_digests, digests[exact])
    exact_pairs = np.stack([exact, first_indices[places]], axis=1)

    # similar pixels: images of one hash are compared once, so that many copies take no longer
    queries = np.flatnonzero(~is_exact & _is_distinctive(dhashes))
    query_dhashes, inverse = np.unique(dhashes[queries], return_inverse=True)
    # in the order of the training images, so that the first of equally close ones is found
    candidates = np.sort(np.unique(training_dhashes, return_index=True)[1])
    candidates = candidates[_is_distinctive(training_dhashes[candidates])]
    closest, distances = _find_closest(query_dhashes, training_dhashes[candidates])
    # or similar to the mirror image
    mirror_closest, mirror_distances = _find_closest(
        _mirror(query_dhashes), training_dhashes[candidates]
    )
    is_mirrored = mirror_distances < distances
    closest[is_mirrored] = mirror_closest[is_mirrored]
    distances = np.minimum(distances, mirror_distances)
    is_near = distances[inverse] <= max_distance
    near_pairs = np.stack([queries[is_near], candidates[closest[inverse][is_near]]], axis=1)
    return Duplicates(exact_pairs, near_pairs)


def find_pairs(hashes: np.ndarray) -> list[tuple[int, int, bool]]:
    """Pairs of images of one set that are the same or nearly, also mirrored; at most 10,000.

    Args:
        hashes: as in `find_duplicates`, uint64 [2, n].

    Returns:
        (first index, second index, whether the pixels are the same), in the order of the images.
    """
    digests, dhashes = hashes
    is_distinctive = _is_distinctive(dhashes)
    mirrored = _mirror(dhashes)
    pairs = []
    for index in range(len(digests) - 1):
        rest = slice(index + 1, None)
        is_exact = digests[rest] == digests[index]
        straight = np.bitwise_count(dhashes[rest] ^ dhashes[index])
        flipped = np.bitwise_count(dhashes[rest] ^ mirrored[index])
        is_near = np.minimum(straight, flipped) <= NEAR
        is_near &= is_distinctive[rest] & is_distinctive[index]
        for other in np.flatnonzero(is_exact | is_near).tolist():
            pairs.append((index, index + 1 + other, bool(is_exact[other])))
        if len(pairs) >= _MAX_PAIRS:
            break
    return pairs[:_MAX_PAIRS]


def _mirror(dhashes: np.ndarray) -> np.ndarray:
    """What `compute_dhash` gives for the mirror images, but for cells that are equally bright."""
    bits = np.unpackbits(dhashes.astype(">u8").view(np.uint8)).reshape(-1, 2, 32)
    # in the mirror, a cell is brighter than its left neighbour where it was not
    across = 1 - bits[:, 0].reshape(-1, 4, 8)[..., ::-1]
    down = bits[:, 1].reshape(-1, 8, 4)[..., ::-1]
    mirrored = np.concatenate([across.reshape(-1, 32), down.reshape(-1, 32)], axis=1)
    return np.packbits(mirrored, axis=1).view(">u8")[:, 0].astype(np.uint64)


def _is_distinctive(dhashes: np.ndarray) -> np.ndarray:
    num_ones = np.bitwise_count(dhashes)
    return np.asarray((num_ones >= _FLAT) & (num_ones <= 64 - _FLAT))


def _find_closest(queries: np.ndarray, training: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first of the closest training hashes of each query, int64 [n], and the bits that differ,
    65 where there are none."""
    closest = np.zeros(len(queries), dtype=np.int64)
    distances = np.full(len(queries), 65)
    if not len(training):
        return closest, distances

    # brute force: 10,000 images against 50,000 take half a second
    rows = max(1, _BLOCK // len(training))
    for start in range(0, len(queries), rows):
        block = slice(start, start + rows)
        num_different = np.bitwise_count(queries[block, None] ^ training)
        closest[block] = num_different.argmin(axis=1)
        distances[block] = num_different.min(axis=1)
    return closest, distances
