"""A temperature that makes probabilities agree with how often they are right."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import log_softmax

from vit.bundle import MODEL_FILE, Bundle, load_bundle, update_metadata
from vit.evaluation.images import EvaluationSet
from vit.evaluation.metrics import Ints, chunk_rows, compute_metrics, score_logits
from vit.evaluation.prediction import Logits
from vit.runtime.processes import current_process


@dataclass(frozen=True)
class Calibration:
    """Metrics of the probabilities before and after the temperature."""

    temperature: float
    # split, num_images and fingerprint of the validation images
    fitted_on: dict[str, str | int]
    # ece, brier, nll
    before: dict[str, float]
    after: dict[str, float]


def calibrate(bundle: Bundle, logits: Logits, validation: EvaluationSet) -> Bundle:
    """Fit the temperature on validation images and keep it in the model file.

    Args:
        bundle: the model, on its device.
        logits: of the validation images, [n, C].
        validation: these images.

    Returns:
        The model, loaded from its file again.

    Raises:
        ValueError: it has no file.
    """
    path = Path(bundle.name)
    if path.is_dir():
        path = path / MODEL_FILE
    if not path.is_file():
        raise ValueError(
            f"{bundle.name} is not a model file; calibration keeps the temperature in one"
        )
    process = current_process()
    if process.is_main:
        metadata = {
            "temperature": fit_temperature(logits, validation.labels),
            "temperature_fitted_on": {
                "split": validation.dataset.split,
                "num_images": len(validation),
                "fingerprint": validation.dataset.fingerprint,
            },
        }
        update_metadata(path, metadata)
    process.wait()
    return load_bundle(bundle.name, device=next(bundle.model.parameters()).device)


def measure_calibration(bundle: Bundle, logits: Logits, labels: Ints) -> Calibration | None:
    """Metrics of the probabilities without and with the model's temperature; None where none was
    ever fitted."""
    if "temperature" not in bundle.metadata:
        return None
    before = compute_metrics(score_logits(logits, labels))
    after = compute_metrics(score_logits(logits, labels, temperature=bundle.temperature))
    names = ("ece", "brier", "nll")
    return Calibration(
        temperature=bundle.temperature,
        fitted_on=bundle.metadata.get("temperature_fitted_on", {}),
        before={name: before[name] for name in names},
        after={name: after[name] for name in names},
    )


def fit_temperature(logits: Logits, labels: Ints) -> float:
    """Fit the temperature that calibrates the probabilities (Guo et al. 2017, section 4.2).

    The cross-entropy is convex in 1/T, so its minimum is the only one; it is found to six digits.

    Args:
        logits: [n, C], of images that are neither trained nor tested on.
        labels: [n].

    Returns:
        The temperature that minimises the cross-entropy of softmax(logits / T), 0.05…20.
    """
    # takes half a second, which other commands don't need
    from scipy.optimize import minimize_scalar

    def cross_entropy(log_temperature: float) -> float:
        losses = []
        for rows in chunk_rows(logits):
            scaled = logits[rows].astype(np.float64) * np.exp(-log_temperature)
            losses.append(log_softmax(scaled, axis=1)[np.arange(len(scaled)), labels[rows]])
        return float(-np.concatenate(losses).mean())

    minimum = minimize_scalar(
        cross_entropy,
        bounds=(np.log(0.05), np.log(20.0)),
        method="bounded",
        options={"xatol": 1e-7},
    )
    return float(np.exp(minimum.x))
