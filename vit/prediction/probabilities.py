"""Probabilities from logits, in float64."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Float32s = NDArray[np.float32]
Ints = NDArray[np.int64]

# Images and logits at a time: this bounds the float64 copies.
_CHUNK_IMAGES = 4096
_CHUNK_LOGITS = 2**22


def chunk_rows(logits: NDArray[Any]) -> Iterator[slice]:
    """Return slices that together cover the rows of [n, C]; with more classes they are shorter."""
    size = min(_CHUNK_IMAGES, max(_CHUNK_LOGITS // logits.shape[1], 1))
    return (slice(start, start + size) for start in range(0, len(logits), size))


def compute_log_probabilities(logits: NDArray[np.floating[Any]], temperature: float) -> Floats:
    """Compute log softmax(logits / temperature) of [n, C]."""
    from scipy.special import log_softmax  # a fifth of a second to import

    scaled = logits.astype(np.float64, copy=False) / temperature
    return np.asarray(log_softmax(scaled, axis=1))
