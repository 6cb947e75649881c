"""Frames of one scene: photos of a burst or a video that show a view shifted by up to a third.

A frame is known by the signs of its details, 32×32 cells: light changes them little, and they can
be compared at any shift.
"""

import numpy as np
from PIL import Image

_SIDE = 32
# numbers of 64 bits that hold the signs of an image
NUM_WORDS = _SIDE**2 // 64
# cells by which frames may be shifted, and the side at which shifted ones don't wrap around
_REACH = 10
_PADDED = 48
# Images with fewer cells of either sign are nearly flat, and all similar.
_MIN_CELLS = 150
# frequencies by which candidates are found, which don't depend on the shift
_NUM_FREQUENCIES = 8
_NUM_CANDIDATES = 5
# random pairs of one class that tell how similar unrelated images are, and those of a class that
# are enough for a limit of its own
_NUM_PAIRS = 6000
_MIN_PAIRS = 100
# Frames are more similar than the lower quartile of such pairs by so many times the distance from
# their 5th percentile: 0.54 on photos, and on clothes or digits beyond 1, which nothing is. The
# lower half is used because pairs of one scene may be among them.
_DISTANCE = 12.5
# the least limit, because few pairs tell little, and the quartile from which on, as of one part in a
# fixed rig, all images of a class are too similar to tell frames
_MIN_LIMIT = 0.5
_MAX_QUARTILE = 0.4
# Sets with a smaller fraction of frames have none. 1 % of Imagenette and 3 % of CIFAR-10 are more
# similar than the limit.
_MIN_FRACTION = 0.05
# pairs that are compared at a time
_BATCH = 1000


def _build_blur(sigma: float) -> np.ndarray:
    """Build the matrix that blurs a column of cells."""
    places = np.arange(_SIDE)
    weights = np.exp(-((places[:, None] - places) ** 2) / (2 * sigma**2))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


_FINE, _COARSE = _build_blur(1), _build_blur(2)


def compute_frame_signs(image: Image.Image) -> list[int]:
    """Compute the signs of an image's details, 16 numbers of 64 bits: 1 where it is brighter than
    its surroundings."""
    cells = np.asarray(image.convert("L").resize((_SIDE, _SIDE), Image.Resampling.BOX), np.float64)
    # a tenth of a level, so that rounding decides nothing on even ground
    is_brighter = _FINE @ cells @ _FINE.T > _COARSE @ cells @ _COARSE.T + 0.1
    words: list[int] = np.packbits(is_brighter).view(">u8").tolist()
    return words


def find_frames(
    words: np.ndarray, strata: np.ndarray, others: np.ndarray | None = None
) -> np.ndarray:
    """Find frames of one scene among images by their `compute_frame_signs`, uint64 [16, n], and
    classes, int64 [n]; or frames of the scenes of `others`, uint64 [16, m].

    Returns:
        Pairs of indices, int64 [p, 2]; none if fewer than a twentieth of the images have one.
    """
    places = known_places = np.flatnonzero(_is_detailed(words))
    if others is not None:
        known_places = np.flatnonzero(_is_detailed(others))
    none = np.zeros((0, 2), np.int64)
    if min(len(places), len(known_places)) < 2:
        return none
    signs = known = _unpack(words[:, places])
    if others is not None:
        known = _unpack(others[:, known_places])
    limits = _find_limits(signs, strata[places])
    pairs = _find_candidates(signs, known, is_one_set=others is None)
    pair_limits = limits[pairs[:, 0]]
    if others is None:
        pair_limits = np.maximum(pair_limits, limits[pairs[:, 1]])
    pairs = pairs[_compare(signs, known, pairs) > pair_limits]
    frames = np.stack([places[pairs[:, 0]], known_places[pairs[:, 1]]], axis=1)
    found = np.unique(frames if others is None else frames[:, 0])
    return frames if len(found) >= _MIN_FRACTION * words.shape[1] else none


def _is_detailed(words: np.ndarray) -> np.ndarray:
    num_ones = np.bitwise_count(words).sum(axis=0, dtype=np.int64)
    return np.asarray((num_ones >= _MIN_CELLS) & (num_ones <= _SIDE**2 - _MIN_CELLS))


def _unpack(words: np.ndarray) -> np.ndarray:
    """Return the signs as −1 and 1, float32 [n, 32, 32]."""
    content = np.ascontiguousarray(words.T.astype(">u8"))
    bits = np.unpackbits(content.view(np.uint8), axis=1)
    return bits.reshape(-1, _SIDE, _SIDE) * np.float32(2) - 1


def _find_limits(signs: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Find the similarity from which on an image of each class counts as a frame, float [n]."""
    rng = np.random.default_rng(0)
    order = np.argsort(classes, kind="stable")
    _, starts, counts = np.unique(classes[order], return_index=True, return_counts=True)
    kind = np.repeat(np.arange(len(counts)), counts)
    first = rng.integers(0, len(order), _NUM_PAIRS)
    # another image of the class
    sizes = counts[kind[first]]
    offsets = rng.integers(1, np.maximum(sizes, 2))
    second = starts[kind[first]] + (first - starts[kind[first]] + offsets) % sizes
    is_pair = first != second
    first, second = first[is_pair], second[is_pair]
    if not len(first):
        return np.full(len(signs), np.inf)
    similarity = _compare(signs, signs, np.stack([order[first], order[second]], axis=1))

    def find_limit(values: np.ndarray) -> float:
        low, quartile = np.quantile(values, [0.05, 0.25])
        if quartile > _MAX_QUARTILE:
            return np.inf
        return max(float(quartile + _DISTANCE * (quartile - low)), _MIN_LIMIT)

    limits = np.full(len(signs), find_limit(similarity))
    for each in range(len(counts)):
        own = similarity[kind[first] == each]
        if min(len(own), counts[each] * (counts[each] - 1) // 2) >= _MIN_PAIRS:
            limits[order[kind == each]] = find_limit(own)
    return limits


def _find_candidates(signs: np.ndarray, known: np.ndarray, *, is_one_set: bool) -> np.ndarray:
    """Find the pairs of the most similar spectra, int64 [p, 2]."""
    # takes long to import
    from sklearn.neighbors import NearestNeighbors

    spectra = _compute_spectra(known)
    # an image is the nearest to itself
    num_nearest = min(_NUM_CANDIDATES + is_one_set, len(known))
    search = NearestNeighbors(n_neighbors=num_nearest, algorithm="brute").fit(spectra)
    own = spectra if is_one_set else _compute_spectra(signs)
    nearest = search.kneighbors(own, return_distance=False)
    pairs = np.stack([np.repeat(np.arange(len(signs)), num_nearest), nearest.ravel()], axis=1)
    if is_one_set:
        pairs = np.unique(np.sort(pairs[pairs[:, 0] != pairs[:, 1]], axis=1), axis=0)
    return pairs


def _compute_spectra(signs: np.ndarray) -> np.ndarray:
    """Compute the amplitudes of low frequencies, float32 [n, 120], which don't depend on the
    shift."""
    from scipy.fft import fftshift, rfft2

    # towards the edges, where frames differ, details count less
    window = np.sqrt(np.hanning(_SIDE + 2)[1:-1]).astype(np.float32)
    centred = signs - signs.mean(axis=(1, 2), keepdims=True)
    shifted = fftshift(np.abs(rfft2(centred * window[:, None] * window)), axes=1)
    middle = slice(_SIDE // 2 - _NUM_FREQUENCIES + 1, _SIDE // 2 + _NUM_FREQUENCIES)
    spectra = np.sqrt(shifted[:, middle, :_NUM_FREQUENCIES]).reshape(len(signs), -1)
    return np.asarray(spectra / np.linalg.norm(spectra, axis=1, keepdims=True))


def _compare(signs: np.ndarray, known: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Compute the similarity of pairs, float [p]: the correlation of the signs at the best shift,
    less where only a part overlaps."""
    from scipy.fft import irfft2, rfft2

    shape = (_PADDED, _PADDED)
    overlap = _SIDE - np.abs(np.arange(-_REACH, _REACH + 1))
    scale = _SIDE * np.sqrt(overlap[:, None] * overlap).astype(np.float32)
    found = [np.zeros(0, np.float32)]
    for start in range(0, len(pairs), _BATCH):
        first, second = pairs[start : start + _BATCH].T
        spectra = rfft2(signs[first], shape) * rfft2(known[second], shape).conj()
        shifts = np.roll(irfft2(spectra, shape), (_REACH, _REACH), axis=(1, 2))
        best = shifts[:, : 2 * _REACH + 1, : 2 * _REACH + 1] / scale
        found.append(best.max(axis=(1, 2)))
    return np.concatenate(found)
