"""A temperature that makes probabilities agree with how often they are right."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.special import log_softmax

from vit.bundle import MODEL_FILE, Bundle, update_metadata
from vit.evaluation.images import EvaluationSet
from vit.evaluation.metrics import Ints, chunk_rows, compute_metrics, score_logits
from vit.evaluation.prediction import Logits
from vit.runtime.files import compute_sha256

# of fewer images in a half, no noise can be estimated
_MIN_HALF = 5


@dataclass(frozen=True)
class Calibration:
    """Metrics of the probabilities without and with the temperature, on the evaluated images."""

    temperature: float
    # split, num_images and fingerprint of the validation images; whether they chose the epoch; their
    # loss and calibration error before and after, each half at the temperature of the other
    fitted_on: dict[str, str | int | float]
    # ece, brier, nll
    before: dict[str, float]
    after: dict[str, float]


def calibrate(bundle: Bundle, logits: Logits, validation: EvaluationSet) -> tuple[Bundle, str]:
    """Fit a temperature on validation images, and keep it where it helps on images that it was not
    fitted on.

    The images are divided by hashes of their pixels. The loss of each half is measured at the
    temperature of the other half; it must fall by more than 1.96 standard errors. The temperature
    that is kept is fitted on both.

    Args:
        bundle: the model.
        logits: of the validation images, [n, C].
        validation: these images.

    Returns:
        The model, with the temperature in its metadata if it helps; and a sentence about it.
    """
    labels = validation.labels
    count = len(labels)
    split = validation.dataset.split
    is_second = validation.dataset.digests % 2 == 1
    if min(is_second.sum(), count - is_second.sum()) < _MIN_HALF:
        return (
            bundle,
            f"not calibrated: {count} images ({split}) are too few to check a temperature",
        )

    # each image at the temperature of the half that it is not in
    scaled = np.empty_like(logits)
    for half in (is_second, ~is_second):
        scaled[half] = logits[half] / fit_temperature(logits[~half], labels[~half])
    before = score_logits(logits, labels)
    after = score_logits(scaled, labels)
    gain = before.nll - after.nll
    helps = gain.mean() > 1.96 * gain.std(ddof=1) / np.sqrt(count)

    temperature = fit_temperature(logits, labels)
    ece_before = compute_metrics(before)["ece"]
    ece_after = compute_metrics(after)["ece"]
    sentence = (
        f"temperature {temperature:.3f}, fitted on {count} images ({split}); on the half that it was"
        f" not fitted on, loss {before.nll.mean():.4f} → {after.nll.mean():.4f}, calibration error"
        f" {ece_before:.4f} → {ece_after:.4f}"
    )
    trained_with = bundle.data.get("splits", {}).get(split, {}).get("fingerprint")
    chose_epoch = trained_with == validation.dataset.fingerprint
    if chose_epoch:
        sentence += "; these images also chose the model's epoch"
    if not helps:
        return bundle, f"not calibrated, the loss doesn't fall beyond noise: {sentence}"

    metadata = {
        **bundle.metadata,
        "temperature": temperature,
        "temperature_fitted_on": {
            "split": split,
            "num_images": count,
            "fingerprint": validation.dataset.fingerprint,
            "chose_epoch": chose_epoch,
            "loss_before": float(before.nll.mean()),
            "loss_after": float(after.nll.mean()),
            "ece_before": ece_before,
            "ece_after": ece_after,
        },
    }
    return replace(bundle, metadata=metadata), f"calibrated: {sentence}"


def save_temperature(bundle: Bundle, target: Path) -> str:
    """Write the model file of `bundle` with its temperature to `target`, which may be that file.

    Returns:
        The SHA-256 of the file.
    """
    names = ("temperature", "temperature_fitted_on")
    values = {name: bundle.metadata[name] for name in names}
    update_metadata(find_model_file(bundle), values, target=target)
    return compute_sha256(target)


def find_model_file(bundle: Bundle) -> Path:
    """The file that a model was loaded from.

    Raises:
        ValueError: it was not loaded from one.
    """
    path = Path(bundle.name)
    if path.is_dir():
        path = path / MODEL_FILE
    if path.suffix != ".safetensors" or not path.is_file():
        raise ValueError(
            f"{bundle.name} is not a model file; calibration keeps the temperature in one"
        )
    return path


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
