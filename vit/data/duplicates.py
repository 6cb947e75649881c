"""Duplicates and near-duplicates between sets of images, by hashes of pixels and perceptual
hashes."""

import hashlib

import numpy as np
from PIL import Image

from vit.data.depth import DeepImage

# bits of 64 by which near-duplicates may differ
_NEAR = 6
# hashes with fewer bits set or unset belong to flat images, which are all similar
_FLAT = 8
# pixels; many smaller images of one class have equal hashes
_MIN_SIDE = 16


def hash_pixels(image: Image.Image) -> int:
    """Compute 64 bits of the sha256 of an image's size and pixels, or of its values of more
    bits."""
    digest = hashlib.sha256(f"{image.width}x{image.height}:".encode())
    digest.update(image.values.tobytes() if isinstance(image, DeepImage) else image.tobytes())
    return int.from_bytes(digest.digest()[:8], "little")


def compute_dhash(image: Image.Image) -> int:
    """Compute the 64-bit difference hash (dHash) of an RGB image, which recoding, rescaling and
    small crops hardly change.

    32 bits compare each cell of a 4×8 grey grid with its left neighbour, and 32 bits each cell of
    an 8×4 grid with the one above. Below 16 pixels the hash is 0, which `find_duplicates` ignores.
    """
    if min(image.size) < _MIN_SIDE:
        return 0
    grey = image.convert("L")
    across = np.asarray(grey.resize((9, 4), Image.Resampling.BOX))
    down = np.asarray(grey.resize((4, 9), Image.Resampling.BOX))
    is_brighter = [across[:, 1:] > across[:, :-1], down[1:] > down[:-1]]
    bits = np.concatenate([part.ravel() for part in is_brighter])
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


def find_duplicates(
    hashes: np.ndarray, training_hashes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Find images that were in training, also mirrored, by the `hash_pixels` and `compute_dhash` of
    each, uint64 [2, n] and [2, m]. Exact pairs are certain, near ones are suspects. Flat images,
    whose hashes are nearly all zeros or ones, are compared by pixels only.

    Returns:
        Pairs with the same pixels, and pairs with other pixels and the closest perceptual hash;
        each int64 [p, 2] of (index among `hashes`, index among `training_hashes`), at most one for
        an image that is searched.
    """
    digests, dhashes = hashes
    training_digests, training_dhashes = training_hashes
    # exact pairs take the first training image with the same pixels
    order = np.argsort(training_digests, kind="stable")
    places = order.take(np.searchsorted(training_digests, digests, sorter=order), mode="clip")
    is_exact = training_digests[places] == digests

    near = []
    candidates = np.flatnonzero(_is_distinctive(training_dhashes))
    known = training_dhashes[candidates]
    queries = np.flatnonzero(_is_distinctive(dhashes) & ~is_exact & (len(known) > 0))
    # brute force: 10,000 images against 50,000 take a second
    for index, *pair in zip(queries, dhashes[queries], _mirror(dhashes[queries]), strict=True):
        # the mirror image may be more similar
        distances = min((np.bitwise_count(known ^ dhash) for dhash in pair), key=np.min)
        if distances.min() <= _NEAR:
            near.append((index, candidates[distances.argmin()]))
    exact = np.flatnonzero(is_exact)
    return np.column_stack([exact, places[exact]]), np.array(near, np.int64).reshape(-1, 2)


def find_pairs(hashes: np.ndarray) -> list[tuple[int, int, bool]]:
    """Find the images of one set that are copies or near-copies of another one, also mirrored.
    Return (first index, second index, true for equal pixels) for each, in the order of the images.

    Each image is compared with the ones that stand for the others so far, in the order of their
    hashes, so that the names and the order of the files don't matter. Near-copies of an image are
    near to it, and not by way of a third one: photos of one texture form no chain.
    """
    digests, dhashes = hashes[:2]
    # the first image with the same pixels
    _, firsts, inverse = np.unique(digests, return_index=True, return_inverse=True)
    originals = firsts[inverse.reshape(-1)]
    copies = np.flatnonzero(originals != np.arange(len(digests))).tolist()
    pairs = [(int(originals[index]), index, True) for index in copies]

    candidates = firsts[_is_distinctive(dhashes[firsts])]
    mirrored = _mirror(dhashes)
    known = np.zeros(len(candidates), dtype=np.uint64)
    indices: list[int] = []
    for index in candidates.tolist():
        earlier = known[: len(indices)]
        distances = np.minimum(
            np.bitwise_count(earlier ^ dhashes[index]), np.bitwise_count(earlier ^ mirrored[index])
        )
        if len(indices) and distances.min() <= _NEAR:
            other = indices[int(distances.argmin())]
            pairs.append((min(index, other), max(index, other), False))
        else:
            known[len(indices)] = dhashes[index]
            indices.append(index)
    return sorted(pairs)


def _mirror(dhashes: np.ndarray) -> np.ndarray:
    """Compute the `compute_dhash` of the mirror images; cells of equal brightness may differ."""
    bits = np.unpackbits(dhashes.astype(">u8").view(np.uint8)).reshape(-1, 2, 32)
    # in the mirror image, left and right are exchanged in each comparison
    across = 1 - bits[:, 0].reshape(-1, 4, 8)[..., ::-1]
    down = bits[:, 1].reshape(-1, 8, 4)[..., ::-1]
    mirrored = np.concatenate([across.reshape(-1, 32), down.reshape(-1, 32)], axis=1)
    return np.packbits(mirrored, axis=1).view(">u8")[:, 0].astype(np.uint64)


def _is_distinctive(dhashes: np.ndarray) -> np.ndarray:
    num_ones = np.bitwise_count(dhashes)
    return np.asarray((num_ones >= _FLAT) & (num_ones <= 64 - _FLAT))
