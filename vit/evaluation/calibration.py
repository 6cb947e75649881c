"""Temperature scaling: one number that calibrates the probabilities (Guo et al. 2017, section 4.2)."""

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax

from vit.evaluation.metrics import Ints, chunk_rows


def fit_temperature(logits: NDArray[np.float32], labels: Ints) -> float:
    """The temperature that minimises the cross-entropy of softmax(logits [n, C] / temperature), 0.05…20.

    The cross-entropy is convex in 1/T, so the minimum is the only one; it is found to six digits.
    """
    from scipy.optimize import minimize_scalar  # takes half a second, which other commands don't need

    def cross_entropy(log_temperature: float) -> float:
        chunks = [
            log_softmax(logits[rows].astype(np.float64) * np.exp(-log_temperature), axis=1)[
                np.arange(len(labels[rows])), labels[rows]
            ]
            for rows in chunk_rows(logits)
        ]
        return float(-np.concatenate(chunks).mean())

    bounds = (np.log(0.05), np.log(20.0))
    fitted = minimize_scalar(cross_entropy, bounds=bounds, method="bounded", options={"xatol": 1e-7})
    return float(np.exp(fitted.x))
