"""Calibration: a temperature with which probabilities agree with accuracies."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.special import expit, log_softmax

from vit.bundle import MODEL_FILE, Bundle, update_metadata
from vit.data.dataset import ImageDataset
from vit.evaluation.images import EvaluationSet
from vit.evaluation.label_metrics import compute_label_ece, score_label_logits
from vit.evaluation.metrics import compute_metrics, score_logits
from vit.model.model_file import TemperatureFit
from vit.prediction.probabilities import Bools, Float32s, Floats, Ints, chunk_rows
from vit.runtime.files import compute_sha256
from vit.runtime.numbers import format_number

# metadata that is fitted on validation images
_FITTED = ("temperature", "temperature_fitted_on", "operating_point")
# with fewer images in a half, the noise can't be estimated
_MIN_HALF = 5


@dataclass(frozen=True)
class Calibration:
    """Metrics without and with the temperature, on the evaluated images.

    Attributes:
        temperature: The temperature.
        fitted_on: Split and fingerprint of the validation images, the fields of `TemperatureFit`,
            and "out_of_fold": whether the images chose the epoch. Then the logits of each image are
            from the epoch that the other half of the images chose.
        before: ece, brier and nll without the temperature; of several labels ece and loss.
        after: The same with it.
    """

    temperature: float
    fitted_on: dict[str, str | int | float]
    before: dict[str, float]
    after: dict[str, float]


def cross_fit_temperature(
    logits: Float32s, labels: Ints | Bools, digests: np.ndarray
) -> TemperatureFit | None:
    """Fit a temperature, and measure it on images that it was not fitted on.

    The images are divided by hashes of their pixels. The loss of each half is measured at the
    temperature of the other half, and helps if it falls by more than 1.96 standard errors. The
    returned temperature is fitted on both halves.

    Args:
        logits: [n, C], of images that had no influence on the model.
        labels: Class of each image, [n], or which labels it has, bool [n, C].
        digests: Hashes of the images, [n].

    Returns:
        The temperature; None if there are too few images or a logit is not finite.
    """
    count = len(labels)
    is_second = digests % 2 == 1
    has_too_few = min(is_second.sum(), count - is_second.sum()) < _MIN_HALF
    if has_too_few or not np.isfinite(logits).all():
        return None

    # each image has the temperature of the other half
    scaled = np.empty_like(logits)
    for half in (is_second, ~is_second):
        scaled[half] = logits[half] / fit_temperature(logits[~half], labels[~half])
    loss_before, ece_before = _measure(logits, labels)
    loss_after, ece_after = _measure(scaled, labels)
    gain = loss_before - loss_after
    return TemperatureFit(
        temperature=fit_temperature(logits, labels),
        num_images=count,
        loss_before=float(loss_before.mean()),
        loss_after=float(loss_after.mean()),
        ece_before=ece_before,
        ece_after=ece_after,
        helps=bool(gain.mean() > 1.96 * gain.std(ddof=1) / np.sqrt(count)),
    )


def _measure(
    logits: Float32s, labels: Ints | Bools, *, temperature: float = 1.0
) -> tuple[Floats, float]:
    """Return the cross-entropy of each image, [n], and the calibration error."""
    if labels.ndim == 2:
        label_scores = score_label_logits(logits, labels.astype(bool), temperature=temperature)
        return label_scores.loss, compute_label_ece(label_scores)
    scores = score_logits(logits, labels.astype(np.int64, copy=False), temperature=temperature)
    return scores.nll, compute_metrics(scores)["ece"]


def was_used_for_epoch(bundle: Bundle, images: EvaluationSet) -> bool:
    """Return whether the model's epoch was chosen on these images."""
    validation = bundle.data.get("splits", {}).get("validation", {})
    return bool(images.dataset.fingerprint == validation.get("fingerprint"))


def calibrate_bundle(
    bundle: Bundle, validation: EvaluationSet, logits: Float32s | None = None
) -> tuple[Bundle, str]:
    """Give a model a temperature, if it helps on images that it was not fitted on.

    Args:
        bundle: The model.
        validation: Images to fit the temperature on.
        logits: Logits of these images, [n, C]. None: the images chose the model's epoch. Then the
            temperature is the one that `vit train` fitted out of fold: on logits of each image at
            the epoch that the other half of the images would have chosen.

    Returns:
        The model, with the temperature in its metadata if it helps, and a sentence about it.
    """
    dataset = validation.dataset
    if logits is None:
        recorded = bundle.metadata.get("out_of_fold_temperature")
        fit = None if recorded is None else TemperatureFit(**recorded)
    else:
        fit = cross_fit_temperature(logits, validation.labels, dataset.digests)
    if fit is None:
        problem = f"{len(validation)} images ({dataset.split}) are too few to check a temperature"
        if logits is None:
            problem += (
                ", or the run that wrote the model file kept no logits of images that had no part"
                " in choosing its epoch"
            )
        return bundle, f"not calibrated: {problem}"

    values, sentence = use_temperature(fit, dataset, out_of_fold=logits is None)
    if not values:
        return bundle, sentence
    return replace(bundle, metadata={**bundle.metadata, **values}), sentence


def use_temperature(
    fit: TemperatureFit, dataset: ImageDataset, *, out_of_fold: bool
) -> tuple[dict[str, object], str]:
    """Return the values of a model file that make the model use a temperature, none if it doesn't
    help, and a sentence about it.

    Args:
        fit: The temperature.
        dataset: Images that it was fitted on.
        out_of_fold: See `Calibration.fitted_on`.
    """
    sentence = (
        f"temperature {fit.temperature:.3f}, fitted on {fit.num_images} images ({dataset.split}"
        f"{', out of fold' if out_of_fold else ''}); on the half that it was not fitted on, loss"
        f" {format_number(fit.loss_before)} → {format_number(fit.loss_after)}, calibration error"
        f" {format_number(fit.ece_before)} → {format_number(fit.ece_after)}"
    )
    if not fit.helps:
        return {}, f"not calibrated, the loss doesn't fall by more than noise: {sentence}"
    fitted_on = {
        "split": dataset.split,
        "fingerprint": dataset.fingerprint,
        "out_of_fold": out_of_fold,
        **fit.model_dump(exclude={"temperature", "helps"}),
    }
    values = {"temperature": fit.temperature, "temperature_fitted_on": fitted_on}
    return values, f"calibrated: {sentence}"


def save_fitted(bundle: Bundle, target: Path) -> str:
    """Write a model file with its temperature and its operating point to `target`, which may be the
    model file itself.

    Returns:
        The SHA-256 of the file.
    """
    values = {name: bundle.metadata[name] for name in _FITTED if name in bundle.metadata}
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
            f"{bundle.name} is not a model file, and the temperature and the operating point are kept"
            " in one; train with --output, or name the file"
        )
    return path


def measure_calibration(
    bundle: Bundle, logits: Float32s, labels: Ints | Bools
) -> Calibration | None:
    """Measure probabilities without and with the model's temperature; None if none was fitted."""
    if "temperature" not in bundle.metadata:
        return None
    measured = []
    for temperature in (1.0, bundle.temperature):
        if bundle.is_multilabel:
            losses, ece = _measure(logits, labels, temperature=temperature)
            measured.append({"ece": ece, "loss": float(losses.mean())})
            continue
        classes = labels.astype(np.int64, copy=False)
        metrics = compute_metrics(score_logits(logits, classes, temperature=temperature))
        measured.append({name: metrics[name] for name in ("ece", "brier", "nll")})
    fitted_on = bundle.metadata.get("temperature_fitted_on", {})
    return Calibration(bundle.temperature, fitted_on, *measured)


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

    # by the logarithm, so that the bounds lie symmetrically around 1
    def cross_entropy(log_temperature: float) -> float:
        if labels.ndim == 2:
            return float(_measure(logits, labels, temperature=np.exp(log_temperature))[0].mean())
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

    supported = (len(logits) + 1) / (len(logits) + 2)

    def find_excess(log_temperature: float) -> float:
        return _measure_confidence(logits, labels, np.exp(log_temperature)) - supported

    if minimum.x < 0 and find_excess(minimum.x) > 0:
        return float(np.exp(brentq(find_excess, minimum.x, 0))) if find_excess(0) < 0 else 1.0
    return float(np.exp(minimum.x))


def _measure_confidence(logits: Float32s, labels: Ints | Bools, temperature: float) -> float:
    """Return the mean probability of what is predicted: of each image's class, or that each of its
    labels is there, or isn't."""
    total = 0.0
    for rows in chunk_rows(logits):
        scaled = logits[rows].astype(np.float64) / temperature
        if labels.ndim == 2:
            total += float(expit(np.abs(scaled)).mean(axis=1).sum())
        else:
            total += float(np.exp(log_softmax(scaled, axis=1).max(axis=1)).sum())
    return total / len(logits)
