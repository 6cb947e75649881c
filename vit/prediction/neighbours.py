"""Nearest neighbours by the cosine of pooled features."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vit.prediction.probabilities import Float32s, Floats, Ints

Features = NDArray[np.floating[Any]]
# the distance is that to the k-th nearest training image (Sun et al. 2022, section 3)
_NUM_NEIGHBOURS = 5
# cosines computed at once: 32 MiB
_BLOCK = 1 << 23


def find_nearest(features: Features, references: Features, count: int) -> tuple[Ints, Float32s]:
    """Find for each row of `features`, [n, D], the rows of `references`, [m, D], with the largest
    cosine. Returns indices and cosines of these neighbours, [n, count] each, the nearest first; m
    where there are fewer."""
    queries, units = (torch.from_numpy(normalize_rows(each)) for each in (features, references))
    count = min(count, len(units))
    rows = max(1, _BLOCK // max(1, len(units)))
    indices, nearest = [], []
    # at least one block: an empty batch gives empty results
    for start in range(0, max(len(queries), 1), rows):
        cosines = queries[start : start + rows] @ units.T
        found = cosines.topk(count)
        indices.append(found.indices)
        nearest.append(found.values)
    return torch.cat(indices).numpy(), torch.cat(nearest).numpy()


def compute_distances(features: Features, training_features: Features) -> Floats:
    """Compute the distance, 0 to 2, of each image's normalised features, [n, D], to its k-th nearest
    training image's, [m, D] (Sun, Ming, Zhu & Li 2022, "Out-of-distribution detection with deep
    nearest neighbors")."""
    _, cosines = find_nearest(features, training_features, _NUM_NEIGHBOURS)
    # |a - b|² = 2 - 2 a·b
    return np.sqrt(np.maximum(2 - 2 * cosines[:, -1], 0)).astype(np.float64)


def normalize_rows(features: Features) -> Float32s:
    """Scale rows to length one, float32; zeros stay zeros."""
    rows = features.astype(np.float32)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(lengths, 1e-12))
