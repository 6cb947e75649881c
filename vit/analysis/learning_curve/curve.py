"""How a linear probe's accuracy grows with the number of its training images.

Errors of classifiers fall with the number of training images n approximately as a + b·n^−c, an
inverse power law (Cortes et al. 1993, "Learning curves: asymptotic values and rate of convergence";
Figueroa et al. 2012, "Predicting sample size required for classification performance"). The law is
fitted to measured accuracies and gives a forecast for twice as many images.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from vit.data.label_sets import number_label_sets
from vit.prediction.features import Features
from vit.prediction.probabilities import Floats
from vit.runtime.documents import check_schema, read_json
from vit.runtime.files import write_json
from vit.training.linear_probe import Balance, LinearProbe

LEARNING_CURVE_FILE = "learning_curve.json"

# fractions of the images of the other folds
FRACTIONS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
_NUM_FOLDS = 5
# Features × classes × images of all regressions: about half a minute of one core.
_MAX_VALUES = 500_000_000
# With less the fit is not determined.
_MIN_POINTS = 4
_MIN_IMAGES_A_CLASS = 5
_MIN_ERRORS = 5
# Exponents c: with 0 the law has no limit; 1 is the rate of a model with a fixed number of weights.
_MIN_EXPONENT, _MAX_EXPONENT = 0.1, 1.0


class CurvePoint(NamedTuple):
    """The accuracy on images that were left out, and its 95 % interval, of probes that were fitted
    on a number of images."""

    num_images: int
    top1: float
    interval: tuple[float, float]


class Forecast(NamedTuple):
    """The accuracy with twice as many images by the power law a + b·n^−c, and its 95 % interval;
    and that of the law with the present images."""

    num_images: int
    top1: float
    interval: tuple[float, float]
    top1_now: float


class LearningCurve(BaseModel):
    """The content of `learning_curve.json`. Accuracies are from 0 to 1.

    Attributes:
        measure: "top1"; or "map" where images have several labels: the mean average precision,
            which takes the place of each accuracy.
        num_images: Images that the probe was fitted on.
        num_folds: Folds in which images, or whole groups, were left out.
        points: Measured accuracies, the smallest number of images first.
        forecast: None if the points don't determine one, for this `reason`.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    schema_version: int = 2
    measure: Literal["top1", "map"] = "top1"
    num_images: int
    num_folds: int
    points: list[CurvePoint]
    forecast: Forecast | None = None
    reason: str | None = None

    def save(self, directory: Path) -> None:
        """Write learning_curve.json into a run's directory."""
        write_json(directory / LEARNING_CURVE_FILE, self.model_dump(mode="json"))

    def describe(self) -> str:
        """Return the forecast in a sentence."""
        forecast = self.forecast
        if forecast is None:
            return f"It is not known whether more photos would help: {self.reason}."
        # Whole percents would hide what is still to be gained.
        digits = int(min(forecast.top1_now, forecast.top1) >= 0.95)
        now, expected = (
            f"{100 * value:.{digits}f} %" for value in (forecast.top1_now, forecast.top1)
        )
        low, high = (f"{100 * value:.{digits}f}" for value in forecast.interval)
        change = "as now" if now == expected else f"instead of {now}"
        what = "are expected to be classified correctly"
        if self.measure == "map":
            what = "are expected as mean average precision"
        return (
            f"With twice as many photos ({forecast.num_images:,}) about {expected}"
            f" ({low}–{high} %) {change} {what}, by the learning curve of a linear probe."
        )


def load_learning_curve(directory: Path) -> LearningCurve | None:
    """Load the curve in a run's directory; None if there is none.

    Raises:
        ValueError: The file is damaged or from an earlier version.
    """
    path = directory / LEARNING_CURVE_FILE
    if not path.is_file():
        return None
    return check_schema(LearningCurve, read_json(path), origin=str(path))


def measure_learning_curve(
    features: Features,
    labels: NDArray[Any],
    probe: LinearProbe,
    *,
    class_names: Sequence[str],
    groups: Sequence[str] | None = None,
    balanced: Balance = False,
) -> LearningCurve:
    """Fit a probe again on parts of its images, and measure it on images that were left out.

    Args:
        features: Features of the images that the probe was fitted on.
        labels: Labels of these images, [n], or which labels each has, [n, C].
        probe: The probe, whose readout and strength are used.
        class_names: Names of the classes.
        groups: Group of each image; a group is left out as a whole. None: each image is its own
            group.
        balanced: See `fit_probe`.

    Returns:
        The curve; without points if no image can be left out or it would take too long, and
        without a forecast if the points don't determine one.
    """
    is_multilabel = labels.ndim == 2
    strata = number_label_sets(labels) if is_multilabel else labels
    numbers = np.arange(len(labels))
    if groups is not None:
        numbers = np.unique(np.array(groups, dtype=object), return_inverse=True)[1]
    # the class that most groups have decides how many folds can have each class
    pairs = np.unique(np.stack([strata, numbers]), axis=1)
    num_folds = min(_NUM_FOLDS, int(np.bincount(pairs[0]).max()))
    curve = LearningCurve(
        measure="map" if is_multilabel else "top1",
        num_images=len(labels),
        num_folds=num_folds,
        points=[],
    )
    if num_folds < 2:
        few = "there are too few photos" if groups is None else "every class has too few groups"
        return curve.model_copy(update={"reason": f"{few} to leave any out"})
    values: Floats = features[probe.readout].numpy().astype(np.float64)
    if values.size * len(class_names) * sum(FRACTIONS) * (num_folds - 1) > _MAX_VALUES:
        reason = f"measuring it with {len(labels):,} photos would take too long"
        return curve.model_copy(update={"reason": reason})

    sizes, scores = _fit_parts(
        values,
        labels,
        strata,
        numbers,
        num_folds=num_folds,
        strength=probe.strength,
        class_weight="balanced" if balanced is True else balanced or None,
    )
    # a part with a single class can't be fitted
    known = ~np.isnan(scores).any(axis=1)
    sizes, scores = sizes[known], scores[known]
    points = [
        CurvePoint(int(size), float(row.mean()), _compute_interval(row))
        for size, row in zip(sizes, scores, strict=True)
    ]
    curve = curve.model_copy(update={"points": points})
    num_classes = len(np.unique(labels)) if not is_multilabel else labels.shape[1]
    is_usable = sizes >= _MIN_IMAGES_A_CLASS * num_classes
    if is_usable.sum() < _MIN_POINTS:
        what = "labels" if is_multilabel else "classes"
        reason = f"{len(labels):,} photos in {num_classes} {what} are too few"
        return curve.model_copy(update={"reason": reason})
    num_errors = round((1 - points[-1].top1) * len(labels))
    if num_errors < _MIN_ERRORS:
        reason = f"{num_errors} errors in {len(labels):,} photos are too few"
        return curve.model_copy(update={"reason": reason})
    forecast = forecast_twice(sizes[is_usable], scores[is_usable], num_images=len(labels))
    return curve.model_copy(update={"forecast": forecast})


def _fit_parts(
    values: Floats,
    labels: NDArray[Any],
    strata: NDArray[Any],
    groups: NDArray[Any],
    *,
    num_folds: int,
    strength: float,
    class_weight: Any,
) -> tuple[NDArray[np.int64], Floats]:
    """Fit logistic regressions to each fraction of the images outside each fold.

    Returns:
        Number of images that they were fitted on, [P], and the accuracy, or for several labels the
        mean average precision, on the images of each fold, [P, folds].
    """
    # scikit-learn takes a second to import
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedGroupKFold, learning_curve
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    regression = LogisticRegression(C=strength, max_iter=500, class_weight=class_weight)
    if labels.ndim == 2:
        regression = OneVsRestClassifier(regression)
    # A part may lack a class, of which scikit-learn warns. One thread, because in many small
    # regressions several would wait for one another.
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")
        sizes, _, scores = learning_curve(
            make_pipeline(StandardScaler(), regression),
            values,
            labels.astype(np.int64),
            cv=list(StratifiedGroupKFold(num_folds).split(values, strata, groups)),
            train_sizes=FRACTIONS,
            shuffle=True,
            random_state=0,
            scoring="average_precision" if labels.ndim == 2 else "accuracy",
        )
    return sizes, scores


def forecast_twice(sizes: NDArray[Any], scores: Floats, *, num_images: int) -> Forecast:
    """Fit the power law to each fold, and continue it to twice as many images; the mean is taken.

    Args:
        sizes: Images that the probes were fitted on, [P].
        scores: Their accuracies on images that were left out, [P, folds].
        num_images: Number of all images.
    """
    from scipy.optimize import curve_fit

    def law(fraction: Floats, a: float, b: float, c: float) -> Floats:
        return a + b * fraction**-c

    # fractions of the largest size, with which b is the error that more images take away
    fractions = sizes / sizes[-1]
    bounds = ([0, 0, _MIN_EXPONENT], [1, 1, _MAX_EXPONENT])
    # accuracy of each fold's law, now and with twice as many images
    reached = []
    for errors in (1 - scores).T:
        start = (errors.min() / 2, min(errors.min() / 2 + 0.01, 1), 0.5)
        fitted, _ = curve_fit(law, fractions, errors, p0=start, bounds=bounds, max_nfev=10_000)
        reached.append(
            [1 - law(count / sizes[-1], *fitted) for count in (num_images, 2 * num_images)]
        )
    now, twice = np.array(reached).clip(0, 1).mean(axis=0)
    # The folds share most of their training images, so that the binomial variance of the images
    # that were left out is added to that between the folds.
    best = scores[-1].mean()
    variance = np.var(reached, axis=0, ddof=1)[1] / len(reached) + best * (1 - best) / num_images
    reach = 1.96 * np.sqrt(variance)
    low, high = np.clip((twice - reach, twice + reach), 0, 1).tolist()
    return Forecast(2 * num_images, float(twice), (low, high), float(now))


def _compute_interval(values: Floats) -> tuple[float, float]:
    """Compute the 95 % interval of the mean over folds by Student's t, within 0 and 1."""
    from scipy.stats import t as student

    reach = student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    low, high = np.clip((values.mean() - reach, values.mean() + reach), 0, 1).tolist()
    return low, high
