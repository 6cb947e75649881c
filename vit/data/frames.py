"""Frames of one scene: photos of a burst or a video that show a view shifted by up to a quarter of
a side. A photo is known by its thumbnail, and compared by its details, which light hardly changes.
"""

import numpy as np
from PIL import Image

# side of a thumbnail; smaller images have too few details
MIN_SIDE = 48
_MIDDLE = slice(MIN_SIDE // 4, 3 * MIN_SIDE // 4)
# low frequencies whose amplitudes, which don't depend on the shift, find candidates
_NUM_FREQUENCIES = 12
_NUM_CANDIDATES = 10
# Two photos are frames of one scene if the correlation of their details is so much of the way from
# that of random pairs to 1: 0.3 % of Imagenette has such a pair, at a correlation of 0.75.
_MIN_RISE = 2 / 3
_NUM_DRAWS = 500
# Photos have more, and drawings on plain ground less, than this share of cells with another
# brightness than the next.
_MIN_DETAILED = 1 / 3


def shrink(image: Image.Image) -> np.ndarray:
    """Return the grey thumbnail of an image, uint8 [48, 48]."""
    return np.asarray(image.convert("L").resize((MIN_SIDE, MIN_SIDE), Image.Resampling.BOX))


def find_frames(thumbnails: np.ndarray) -> np.ndarray:
    """Find pairs of frames of one scene, int64 [p, 2], by their indices among thumbnails of
    `shrink`, uint8 [n, 48, 48]."""
    # take long to import
    import cv2
    from scipy.ndimage import gaussian_filter
    from sklearn.neighbors import NearestNeighbors

    places = np.flatnonzero((np.diff(thumbnails, axis=2) != 0).mean(axis=(1, 2)) >= _MIN_DETAILED)
    if len(places) <= _NUM_CANDIDATES:
        return np.empty((0, 2), np.int64)
    cells = thumbnails[places].astype(np.float32)
    # How much brighter a cell is than its surroundings, relative to the contrast there; three grey
    # levels more, so that noise on even ground counts little.
    excess = gaussian_filter(cells, (0, 0.7, 0.7)) - gaussian_filter(cells, (0, 2.5, 2.5))
    details = excess / np.sqrt(gaussian_filter(excess**2, (0, 4, 4)) + 9)
    # towards the edges, where frames differ, details count less
    window = np.hanning(MIN_SIDE).astype(np.float32)
    spectra = np.sqrt(np.abs(np.fft.rfft2(details * window * window[:, None])))
    low = np.roll(spectra, _NUM_FREQUENCIES, axis=1)[:, : 2 * _NUM_FREQUENCIES, :_NUM_FREQUENCIES]
    search = NearestNeighbors(n_neighbors=_NUM_CANDIDATES)
    nearest = search.fit(low.reshape(len(low), -1)).kneighbors_graph()
    candidates = np.unique(np.sort(np.transpose(nearest.nonzero())), axis=0)

    def correlate(first: int, second: int) -> float:
        # the middle of each photo is looked for in the other one
        pair = details[first], details[second]
        return min(
            float(cv2.matchTemplate(other, own[_MIDDLE, _MIDDLE], cv2.TM_CCORR_NORMED).max())
            for own, other in (pair, pair[::-1])
        )

    draws = np.random.default_rng(0).integers(len(places), size=(_NUM_DRAWS, 2))
    unrelated = np.median([correlate(*pair) for pair in draws])
    limit = unrelated + _MIN_RISE * (1 - unrelated)
    is_frame = [correlate(*pair) >= limit for pair in candidates]
    return places[candidates[is_frame]]
