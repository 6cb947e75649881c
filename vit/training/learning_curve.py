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
from jaxtyping import Float, Int
from scipy.special import stdtrit
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from vit.runtime.files import format_json, write_atomically

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
        points: Measured accuracies, the smallest number of images first; empty if no image can be
            left out or it would take too long.
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
        content = {"schema_version": 3, **asdict(self)}
        write_atomically(directory / "learning_curve.json", format_json(content))


def measure_learning_curve(
    features: Float[np.ndarray, "n D"],
    labels: Int[np.ndarray, " n"],
    *,
    strength: float,
    class_weight: Any = None,
    groups: Sequence[str] | None = None,
) -> LearningCurve:
    """Fit a probe again on parts of its images, and measure it on images that were left out.

    Args:
        features: Features of the images that the probe was fitted on.
        labels: Labels of these images.
        strength, class_weight: C and class_weight of scikit-learn's LogisticRegression.
        groups: Group of each image; a group is left out as a whole. None: each image is its own
            group.
    """
    # scikit-learn takes a second to import
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedGroupKFold, learning_curve
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    count = len(labels)
    numbers = np.arange(count)
    if groups is not None:
        numbers = np.unique(np.array(groups, dtype=object), return_inverse=True)[1]
    # the class that most groups have decides how many folds can have each class
    pairs = np.unique(np.stack([labels, numbers]), axis=1)
    num_folds = min(_NUM_FOLDS, int(np.bincount(pairs[0]).max()))
    num_classes = len(np.unique(labels))
    points: list[Point] = []

    def stop(reason: str) -> LearningCurve:
        sentence = f"It is not known whether more photos would help: {reason}."
        return LearningCurve(count, num_folds, points, None, None, sentence)

    if num_folds < 2:
        return stop("every class has too few photos or groups to leave any out")
    if features.size * num_classes * sum(_FRACTIONS) * (num_folds - 1) > _MAX_VALUES:
        return stop(f"measuring it with {count:,} photos would take too long")
    probe = LogisticRegression(C=strength, max_iter=500, class_weight=class_weight)
    # A part may lack a class, of which scikit-learn warns. One thread, because in many small
    # regressions several would wait for one another.
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")
        sizes, _, scores = learning_curve(
            make_pipeline(StandardScaler(), probe),
            features,
            labels,
            cv=list(StratifiedGroupKFold(num_folds).split(features, labels, numbers)),
            train_sizes=_FRACTIONS,
            shuffle=True,
            random_state=0,
        )
    # parts of a single class have none
    is_known = ~np.isnan(scores).any(axis=1)
    sizes, scores = sizes[is_known], scores[is_known]
    for size, row in zip(sizes, scores, strict=True):
        # Student's t of the mean over folds
        reach = stdtrit(num_folds - 1, 0.975) * row.std(ddof=1) / np.sqrt(num_folds)
        points.append(_build_point(int(size), row.mean(), reach))
    is_usable = sizes >= _MIN_IMAGES_A_CLASS * num_classes
    num_errors = round((1 - points[-1].top1) * count)
    if is_usable.sum() < _MIN_POINTS or num_errors < _MIN_ERRORS:
        photos = f"{count:,} photos in {num_classes} classes, {num_errors} of them wrong,"
        return stop(f"{photos} are too few")
    forecast, now = forecast_twice(sizes[is_usable], scores[is_usable], num_images=count)

    # Whole percents would hide what is still to be gained.
    digits = int(min(now, forecast.top1) >= 0.95)
    values = (now, forecast.top1, *forecast.interval)
    before, expected, low, high = (f"{100 * value:.{digits}f}" for value in values)
    change = "as now" if before == expected else f"instead of {before} %"
    sentence = (
        f"With twice as many photos ({forecast.num_images:,}) about {expected} % ({low}–{high} %)"
        f" {change} are expected to be classified correctly, by the learning curve of a linear probe."
    )
    return LearningCurve(count, num_folds, points, forecast, now, sentence)


def forecast_twice(
    sizes: Int[np.ndarray, " P"], scores: Float[np.ndarray, "P folds"], *, num_images: int
) -> tuple[Point, float]:
    """Fit the power law to the accuracies `scores` of probes of `sizes` images, and continue it to
    twice as many as there are. Returns the forecast, and the law's accuracy of the present images."""

    # scipy.optimize takes a fifth of a second to import
    from scipy.optimize import curve_fit

    def law(fraction: Any, a: float, b: float, c: float) -> Any:
        return a + b * fraction**-c

    # fractions of the largest size, with which b is the error that more images take away
    fractions = sizes / sizes[-1]
    present = num_images / sizes[-1]
    bounds = ([0, 0, _MIN_EXPONENT], [1, 1, _MAX_EXPONENT])
    # accuracy of each fold's law, now and with twice as many images
    reached = []
    for errors in (1 - scores).T:
        start = (errors.min() / 2, min(errors.min() / 2 + 0.01, 1), 0.5)
        fitted, _ = curve_fit(law, fractions, errors, p0=start, bounds=bounds, max_nfev=10_000)
        reached.append([1 - law(present, *fitted), 1 - law(2 * present, *fitted)])
    now, twice = np.array(reached).clip(0, 1).mean(axis=0)
    # The folds share most of their training images, so that the binomial variance of the images
    # that were left out is added to that between the folds.
    best = scores[-1].mean()
    variance = np.var(reached, axis=0, ddof=1)[1] / len(reached) + best * (1 - best) / num_images
    return _build_point(2 * num_images, twice, 1.96 * np.sqrt(variance)), float(now)


def _build_point(num_images: int, top1: float, reach: float) -> Point:
    low, high = np.clip((top1 - reach, top1 + reach), 0, 1).tolist()
    return Point(num_images, float(top1), (low, high))
