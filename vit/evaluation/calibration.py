"""Calibration: a temperature with which probabilities agree with accuracies."""

from pathlib import Path

import numpy as np

from vit.bundle import MODEL_FILE, Bundle, update_metadata
from vit.evaluation.images import EvaluationSet
from vit.evaluation.metrics import Scores, score_logits
from vit.prediction.probabilities import Bools, Float32s, Ints
from vit.runtime.files import compute_sha256

# with fewer images, a fitted temperature is mostly noise
MIN_IMAGES = 30


def was_used_for_epoch(bundle: Bundle, images: EvaluationSet) -> bool:
    """Return whether the model's epoch was chosen on these images."""
    validation = bundle.data.get("splits", {}).get("validation", {})
    return bool(images.dataset.fingerprint == validation.get("fingerprint"))


def save_fitted(bundle: Bundle, target: Path) -> str:
    """Write a model file with its operating point to `target`.

    Returns:
        The SHA-256 of the file.
    """
    values = {"operating_point": bundle.metadata["operating_point"]}
    update_metadata(find_model_file(bundle), values, target=target)
    return compute_sha256(target)


def find_model_file(bundle: Bundle) -> Path:
    """Return the file that a model was loaded from.

    Raises:
        ValueError: It was not loaded from a file.
    """
    path = Path(bundle.name)
    if path.is_dir():
        path = path / MODEL_FILE
    if path.suffix != ".safetensors" or not path.is_file():
        raise ValueError(
            f"{bundle.name} is not a model file, and the operating point is kept in one; train with"
            " --output, or name the file"
        )
    return path


def fit_temperature(logits: Float32s, labels: Ints | Bools) -> float:
    """Fit the temperature that calibrates the probabilities (Guo et al. 2017, section 4.2).

    The cross-entropy is convex in 1/T, so it has only one minimum. It is found to six digits. If all
    n images are right, it falls without end: probabilities are raised no further than to a mean of
    (n + 1) / (n + 2), the rule of succession, which n images without an error support.

    Args:
        logits: [n, C], of images that are neither for training nor for testing.
        labels: Class of each image, [n], or which labels it has, bool [n, C].

    Returns:
        The temperature that minimises the cross-entropy of softmax(logits / T), of several labels
        that of sigmoid(logits / T), 0.05…20.
    """
    # half a second to import
    from scipy.optimize import brentq, minimize_scalar

    if labels.ndim == 2:
        labels = labels.astype(bool)

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
        # a model may be sure that a label isn't there
        found = score(log_temperature).probabilities
        if labels.ndim == 2:
            found = np.stack([found, 1 - found], axis=-1)
        return float(found.max(axis=-1).mean()) - supported

    if minimum.x >= 0 or find_excess(minimum.x) <= 0:
        return float(np.exp(minimum.x))
    if find_excess(0) >= 0:
        return 1.0
    return float(np.exp(brentq(find_excess, minimum.x, 0)))
