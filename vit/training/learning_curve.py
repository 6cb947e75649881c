"""How a linear probe's accuracy grows with the number of its training images.

Errors of classifiers fall with the number of training images n approximately as a + b·n^−c, an
inverse power law (Cortes et al. 1993, "Learning curves: asymptotic values and rate of convergence";
Figueroa et al. 2012, "Predicting sample size required for classification performance"). The law is
fitted to measured accuracies and gives a forecast for twice as many images.
"""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from vit.evaluation.report.learning_curve import LEARNING_CURVE_FILE, SCHEMA_VERSION
from vit.prediction.probabilities import Floats, Ints
from vit.runtime.files import write_json

# fractions of the images of the other folds
_FRACTIONS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
_NUM_FOLDS = 5
# Features × classes × images of all regressions: about half a minute of one core.
_MAX_VALUES = 500_000_000
# With less the fit is not determined.
_MIN_POINTS = 4
_MIN_IMAGES_A_CLASS = 5
_MIN_ERRORS = 5
# Exponents c: with 0 the law has no limit; 1 is the rate of a model with a fixed number of weights.
_MIN_EXPONENT, _MAX_EXPONENT = 0.1, 1.0


@dataclass(frozen=True)
class Point:
    """The accuracy of probes that were fitted on a number of images, and its 95 % interval."""

    num_images: int
    top1: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class LearningCurve:
    """The content of `learning_curve.json`. Accuracies are from 0 to 1, on images left out.

    Attributes:
        num_images: Images that the probe was fitted on.
        num_folds: Folds in which images, or whole groups, were left out.
        points: Measured accuracies, the smallest number of images first.
        forecast: The point of twice as many images; None if the others don't determine it.
        top1_now: Accuracy of the forecast's law with the present images.
        sentence: A sentence about more images.
    """

    num_images: int
    num_folds: int
    points: list[Point]
    forecast: Point | None
    top1_now: float | None
    sentence: str

    def save(self, directory: Path) -> None:
        """Write learning_curve.json into a run's directory."""
        content = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        write_json(directory / LEARNING_CURVE_FILE, content)


def measure_learning_curve(
    features: Floats,
    labels: Ints,
    *,
    strength: float,
    class_weight: Any = None,
    groups: Sequence[str] | None = None,
) -> LearningCurve:
    """Fit a probe again on parts of its images, and measure it on images that were left out.

    Args:
        features: Features of the images that the probe was fitted on, [n, D].
        labels: Labels of these images, [n].
        strength: Inverse of the probe's L2 penalty, scikit-learn's C.
        class_weight: See scikit-learn's LogisticRegression.
        groups: Group of each image; a group is left out as a whole. None: each image is its own
            group.

    Returns:
        The curve; without points if no image can be left out or it would take too long, and
        without a forecast if the points don't determine one.
    """
    numbers = np.arange(len(labels))
    if groups is not None:
        numbers = np.unique(np.array(groups, dtype=object), return_inverse=True)[1]
    # the class that most groups have decides how many folds can have each class
    pairs = np.unique(np.stack([labels, numbers]), axis=1)
    num_folds = min(_NUM_FOLDS, int(np.bincount(pairs[0]).max()))
    num_classes = len(np.unique(labels))

    def stop(reason: str, points: Sequence[Point] = ()) -> LearningCurve:
        sentence = f"It is not known whether more photos would help: {reason}."
        return LearningCurve(len(labels), num_folds, list(points), None, None, sentence)

    if num_folds < 2:
        few = "there are too few photos" if groups is None else "every class has too few groups"
        return stop(f"{few} to leave any out")
    if features.size * num_classes * sum(_FRACTIONS) * (num_folds - 1) > _MAX_VALUES:
        return stop(f"measuring it with {len(labels):,} photos would take too long")

    sizes, scores = _fit_parts(
        features, labels, numbers, num_folds=num_folds, C=strength, class_weight=class_weight
    )
    points = [
        Point(int(size), float(row.mean()), _compute_interval(row))
        for size, row in zip(sizes, scores, strict=True)
    ]
    is_usable = sizes >= _MIN_IMAGES_A_CLASS * num_classes
    if is_usable.sum() < _MIN_POINTS:
        return stop(f"{len(labels):,} photos in {num_classes} classes are too few", points)
    num_errors = round((1 - points[-1].top1) * len(labels))
    if num_errors < _MIN_ERRORS:
        return stop(f"{num_errors} errors in {len(labels):,} photos are too few", points)
    forecast, now = forecast_twice(sizes[is_usable], scores[is_usable], num_images=len(labels))
    sentence = _describe(forecast, now)
    return LearningCurve(len(labels), num_folds, points, forecast, now, sentence)


def _fit_parts(
    features: Floats, labels: Ints, groups: Ints, *, num_folds: int, **options: Any
) -> tuple[Ints, Floats]:
    """Fit logistic regressions to each fraction of the images outside each fold.

    Returns:
        Number of images that they were fitted on, [P], and the accuracy on the images of each
        fold, [P, folds]; without parts that have a single class.
    """
    # scikit-learn takes a second to import
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedGroupKFold, learning_curve
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    # A part may lack a class, of which scikit-learn warns. One thread, because in many small
    # regressions several would wait for one another.
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")
        sizes, _, scores = learning_curve(
            make_pipeline(StandardScaler(), LogisticRegression(max_iter=500, **options)),
            features,
            labels,
            cv=list(StratifiedGroupKFold(num_folds).split(features, labels, groups)),
            train_sizes=_FRACTIONS,
            shuffle=True,
            random_state=0,
        )
    is_known = ~np.isnan(scores).any(axis=1)
    return sizes[is_known], scores[is_known]


def forecast_twice(sizes: NDArray[Any], scores: Floats, *, num_images: int) -> tuple[Point, float]:
    """Fit the power law to each fold, and continue it to twice as many images; the mean is taken.

    Args:
        sizes: Images that the probes were fitted on, [P].
        scores: Their accuracies on images that were left out, [P, folds].
        num_images: Number of all images.

    Returns:
        The forecast, and the accuracy of the law with the present images.
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
    return Point(2 * num_images, float(twice), (low, high)), float(now)


def _describe(forecast: Point, now: float) -> str:
    # Whole percents would hide what is still to be gained.
    digits = int(min(now, forecast.top1) >= 0.95)
    low, high = (f"{100 * value:.{digits}f}" for value in forecast.interval)
    before, expected = (f"{100 * value:.{digits}f} %" for value in (now, forecast.top1))
    change = "as now" if before == expected else f"instead of {before}"
    return (
        f"With twice as many photos ({forecast.num_images:,}) about {expected} ({low}–{high} %)"
        f" {change} are expected to be classified correctly, by the learning curve of a linear probe."
    )


def _compute_interval(values: Floats) -> tuple[float, float]:
    """Compute the 95 % interval of the mean over folds by Student's t, within 0 and 1."""
    from scipy.stats import t as student

    reach = student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    low, high = np.clip((values.mean() - reach, values.mean() + reach), 0, 1).tolist()
    return low, high
