"""Calibration: a temperature with which probabilities agree with accuracies."""

import numpy as np

from vit.evaluation.metrics import Scores, score_logits
from vit.prediction.probabilities import Bools, Float32s, Ints

# with fewer images, a fitted temperature is mostly noise
MIN_IMAGES = 30


def fit_temperature(logits: Float32s, labels: Ints | Bools) -> float:
    """Fit the temperature that calibrates the probabilities (Guo et al. 2017, section 4.2).

    If all n images are right, the cross-entropy has no minimum: probabilities are raised no further
    than to a mean of (n + 1) / (n + 2), the rule of succession. The images are neither for training
    nor for testing; see `score_logits`.

    Returns:
        The temperature that minimises the cross-entropy of softmax(logits / T), of several labels
        that of sigmoid(logits / T), 0.05…20.
    """
    # half a second to import
    from scipy.optimize import brentq, minimize_scalar

    # by the logarithm, so that the bounds lie symmetrically around 1
    def score(log_temperature: float) -> Scores:
        return score_logits(logits, labels, temperature=float(np.exp(log_temperature)))

    minimum = minimize_scalar(
        lambda log_temperature: score(log_temperature).loss.mean(),
        bounds=(np.log(0.05), np.log(20.0)),
        method="bounded",
        options={"xatol": 1e-7},
    )
    supported = (len(logits) + 1) / (len(logits) + 2)

    def find_excess(log_temperature: float) -> float:
        found = score(log_temperature).probabilities
        if labels.ndim == 2:
            # a model may be sure that a label isn't there
            found = np.stack([found, 1 - found], axis=-1)
        return float(found.max(axis=-1).mean()) - supported

    if minimum.x >= 0 or find_excess(minimum.x) <= 0:
        return float(np.exp(minimum.x))
    if find_excess(0) >= 0:
        return 1.0
    return float(np.exp(brentq(find_excess, minimum.x, 0)))
