"""A temperature that makes probabilities agree with how often they are right."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from scipy.special import log_softmax

from vit.bundle import MODEL_FILE, Bundle, update_metadata
from vit.evaluation.images import EvaluationSet
from vit.evaluation.metrics import compute_metrics, score_logits
from vit.prediction.predictor import LogitArray
from vit.prediction.probabilities import Ints, chunk_rows
from vit.runtime.files import compute_sha256

# of fewer images in a half, no noise can be estimated
_MIN_HALF = 5


@dataclass(frozen=True)
class Calibration:
    """Metrics of the probabilities without and with the temperature, on the evaluated images."""

    temperature: float
    # split and fingerprint of the validation images; whether they chose the epoch, each then at the
    # epoch that others did ("out_of_fold"); and the fields of `TemperatureFit`
    fitted_on: dict[str, str | int | float]
    # ece, brier, nll
    before: dict[str, float]
    after: dict[str, float]


@dataclass(frozen=True)
class TemperatureFit:
    """A temperature, and what it does to images that it was not fitted on."""

    temperature: float
    num_images: int
    loss_before: float
    loss_after: float
    ece_before: float
    ece_after: float
    # the loss falls by more than noise
    helps: bool


def cross_fit_temperature(
    logits: LogitArray, labels: Ints, digests: np.ndarray
) -> TemperatureFit | None:
    """Fit a temperature, and measure it on images that it was not fitted on.

    The images are divided by hashes of their pixels. The loss of each half is measured at the
    temperature of the other half; it must fall by more than 1.96 standard errors. The temperature
    that is returned is fitted on both.

    Args:
        logits: [n, C], of images that chose nothing about the model that gave them.
        labels: [n].
        digests: [n], the hashes.

    Returns:
        The temperature; None of too few images, and where a logit is not a finite number.
    """
    count = len(labels)
    is_second = digests % 2 == 1
    has_too_few = min(is_second.sum(), count - is_second.sum()) < _MIN_HALF
    if has_too_few or not np.isfinite(logits).all():
        return None

    # each image at the temperature of the half that it is not in
    scaled = np.empty_like(logits)
    for half in (is_second, ~is_second):
        scaled[half] = logits[half] / fit_temperature(logits[~half], labels[~half])
    before = score_logits(logits, labels)
    after = score_logits(scaled, labels)
    gain = before.nll - after.nll
    return TemperatureFit(
        temperature=fit_temperature(logits, labels),
        num_images=count,
        loss_before=float(before.nll.mean()),
        loss_after=float(after.nll.mean()),
        ece_before=compute_metrics(before)["ece"],
        ece_after=compute_metrics(after)["ece"],
        helps=bool(gain.mean() > 1.96 * gain.std(ddof=1) / np.sqrt(count)),
    )


def was_used_for_epoch(bundle: Bundle, validation: EvaluationSet) -> bool:
    """Whether the model's epoch was chosen on these images."""
    splits = bundle.data.get("splits", {})
    recorded = splits.get(validation.dataset.split, {}).get("fingerprint")
    return bool(recorded == validation.dataset.fingerprint)


def calibrate_bundle(
    bundle: Bundle, validation: EvaluationSet, logits: LogitArray | None = None
) -> tuple[Bundle, str]:
    """Keep a temperature where it helps on images that it was not fitted on.

    Args:
        bundle: the model.
        validation: the images that the temperature is for.
        logits: of the model for these images, [n, C]. None where they chose the model's epoch: then
            the temperature is the one that `vit train` fitted out of fold, on logits of each image
            at the epoch that the other half of the images would have chosen.

    Returns:
        The model, with the temperature in its metadata if it helps; and a sentence about it.
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
                ", or the model file is of a run that kept none of images which did not choose its"
                " epoch"
            )
        return bundle, f"not calibrated: {problem}"

    sentence = (
        f"temperature {fit.temperature:.3f}, fitted on {fit.num_images} images ({dataset.split}"
        f"{', out of fold' if logits is None else ''}); on the half that it was not fitted on, loss"
        f" {fit.loss_before:.4f} → {fit.loss_after:.4f}, calibration error {fit.ece_before:.4f} →"
        f" {fit.ece_after:.4f}"
    )
    if not fit.helps:
        return bundle, f"not calibrated, the loss doesn't fall beyond noise: {sentence}"

    measured = asdict(fit)
    del measured["helps"]
    metadata = {
        **bundle.metadata,
        "temperature": measured.pop("temperature"),
        "temperature_fitted_on": {
            "split": dataset.split,
            "fingerprint": dataset.fingerprint,
            "out_of_fold": logits is None,
            **measured,
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


def measure_calibration(bundle: Bundle, logits: LogitArray, labels: Ints) -> Calibration | None:
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


def fit_temperature(logits: LogitArray, labels: Ints) -> float:
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
