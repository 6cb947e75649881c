"""How a linear probe's accuracy grows with the number of its training images.

Errors of classifiers fall with the number of training images n approximately as a + b·n^−c, an
inverse power law (Cortes et al. 1993, "Learning curves: asymptotic values and rate of convergence";
Figueroa et al. 2012, "Predicting sample size required for classification performance"). The law is
fitted to measured accuracies and gives a forecast for twice as many images.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from vit.data.label_sets import number_label_sets
from vit.evaluation.clusters import compute_clustered_interval, number_clusters
from vit.evaluation.metrics import compare_precision, score_logits
from vit.evaluation.significance import SIGNIFICANCE, compute_mcnemar
from vit.prediction.features import Features
from vit.prediction.probabilities import Floats, Ints
from vit.runtime.documents import check_schema, read_json
from vit.runtime.files import write_json
from vit.training.folds import assign_folds
from vit.training.linear_probe import Balance, LinearProbe, as_array, fit_path

LEARNING_CURVE_FILE = "learning_curve.json"

# Fractions of the training images. Classes that gain are found by comparing half with all.
FRACTIONS = (0.1, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0)
_HALF = FRACTIONS.index(0.5)
# Features × classes × images of all regressions: about ten seconds of one core, at 20 to 80
# nanoseconds a value. Above it folds are skipped, and then the largest parts.
_MAX_VALUES = 300_000_000
# With less the fit is not determined.
_MIN_POINTS = 4
_MIN_IMAGES_A_CLASS = 5
_MIN_ERRORS = 5
# Exponents c: with 0 the law has no limit; 1 is the rate of a model with a fixed number of weights.
_EXPONENTS = np.geomspace(0.1, 1.0, 60)
_NUM_DRAWS = 1000
# half of the largest size, with some slack because sizes are whole images
_HALF_SLACK = 0.55
# The power law has three parameters.
_MIN_BACKTEST_POINTS = 3
_MAX_GAINS = 5
_MAX_NAMES = 3

Bools = NDArray[np.bool_]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(gt=0, lt=2**53)]


@dataclass(frozen=True)
class CurvePoint:
    """The accuracy of probes fitted on a fraction of the images.

    Attributes:
        fraction: Fraction of the images that weren't left out.
        num_images: Images that a probe was fitted on, the mean over the folds.
        top1: Accuracy on the images that were left out.
        interval: Its 95 % interval, clustered by group.
    """

    fraction: Share
    num_images: Count
    top1: Share
    interval: tuple[Share, Share]


@dataclass(frozen=True)
class Forecast:
    """The forecast of the power law a + b·n^−c.

    Attributes:
        num_images: Twice the number of images.
        top1: Accuracy with that many.
        interval: Its 95 % interval.
        top1_now: Accuracy of the law with the present images.
    """

    num_images: Count
    top1: Share
    interval: tuple[Share, Share]
    top1_now: Share
    a: Share
    b: Annotated[float, Field(ge=0, lt=1e18)]
    c: Annotated[float, Field(ge=0, lt=10)]

    def compute_top1(self, num_images: float) -> float:
        """Return the accuracy that the law gives for a number of images."""
        return float(1 - self.a - self.b * num_images**-self.c)


@dataclass(frozen=True)
class ClassGain:
    """A class with a significantly higher recall by all images than by half of them."""

    name: str
    recall_half: Share
    recall_all: Share

    @property
    def difference(self) -> float:
        """Difference of the recalls, 0 to 1."""
        return self.recall_all - self.recall_half


class LearningCurve(BaseModel):
    """The content of `learning_curve.json`. Accuracies and recalls are from 0 to 1.

    Attributes:
        measure: "top1"; or "map" where images have several labels: the mean average precision,
            which takes the place of each accuracy.
        num_images: Images that the probe was fitted on.
        num_groups: Groups of these images; None if each image is its own.
        num_folds: Folds in which images were left out.
        points: Measured accuracies, the smallest fraction first.
        forecast: None if the points don't determine one, for this `reason`.
        gains: Classes that gain most, the largest gain first.
        note: Folds or fractions that were left out to save time.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    schema_version: int = 1
    measure: Literal["top1", "map"] = "top1"
    num_images: Count
    num_groups: int | None
    num_folds: int
    points: list[CurvePoint]
    forecast: Forecast | None = None
    reason: str | None = None
    gains: list[ClassGain] = []
    note: str | None = None

    def give_up(self, reason: str) -> "LearningCurve":
        """Return the same curve without a forecast, for a reason."""
        return self.model_copy(update={"reason": reason})

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
        now = f"{100 * forecast.top1_now:.{digits}f} %"
        expected = f"{100 * forecast.top1:.{digits}f} %"
        low, high = forecast.interval
        interval = f"{100 * low:.{digits}f}–{100 * high:.{digits}f} %"
        change = "as now" if now == expected else f"instead of {now}"
        gains = ""
        if self.gains:
            names = ", ".join(gain.name for gain in self.gains[:_MAX_NAMES])
            gains = f" The classes that would gain most: {names}."
        what = "are expected to be classified correctly"
        if self.measure == "map":
            what = "are expected as mean average precision"
        return (
            f"With twice as many photos ({forecast.num_images:,}) about {expected} ({interval})"
            f" {change} {what}, by the learning curve of a linear probe.{gains}"
        )


def load_learning_curve(directory: Path) -> LearningCurve | None:
    """Load the curve in a run's directory; None if there is none.

    Raises:
        ValueError: The file is damaged.
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
        groups: Group of each image; a group is left out, or added, as a whole. None: each image is
            its own group.
        balanced: See `fit_probe`.

    Returns:
        The curve; without points if no image can be left out or it would take too long, and
        without a forecast if the points don't determine one.
    """
    folds = assign_folds(labels, groups)
    clusters = number_clusters(groups, len(labels))
    num_folds = int(folds.max()) + 1
    curve = LearningCurve(
        measure="map" if labels.ndim == 2 else "top1",
        num_images=len(labels),
        num_groups=None if groups is None else len(set(groups)),
        num_folds=num_folds,
        points=[],
    )
    if num_folds < 2:
        if groups is not None:
            return curve.give_up("every class has too few groups to leave any out")
        return curve.give_up("there are too few photos to leave any out")

    values = as_array(features, probe.readout)
    # in regressions on all images of the other folds
    max_fits = _MAX_VALUES / (values.size * len(class_names) * (1 - 1 / num_folds))
    # one fold is measured at least, with as many fractions as fit into the limit
    totals = np.cumsum(FRACTIONS)
    fractions = FRACTIONS[: int((totals <= max_fits).sum())]
    num_measured = min(max(int(max_fits / totals[-1]), 1), num_folds)
    if len(fractions) < _MIN_POINTS:
        return curve.give_up(f"measuring it with {len(labels):,} photos would take too long")
    folds = np.where(folds < num_measured, folds, -1)
    # in many small regressions several threads would wait for one another
    with threadpool_limits(1):
        sizes, answers = _fit_parts(
            values, labels, folds, clusters, fractions, strength=probe.strength, balanced=balanced
        )
    is_out = folds >= 0
    answers, clusters = answers[:, is_out], clusters[is_out]
    correct = answers
    if labels.ndim == 2:
        scores = [score_logits(each, labels[is_out]) for each in answers]
        correct = np.stack([each.correct for each in scores])
        top1, intervals, covariance = compare_precision(scores, list(map(str, clusters)))
        num_classes = int(labels.any(axis=0).sum())
    else:
        top1 = correct.mean(axis=1)
        intervals = [compute_clustered_interval(row, clusters) for row in correct]
        covariance = _compute_covariance(correct, clusters)
        num_classes = len(np.unique(labels))
    points = [
        CurvePoint(fraction, round(size), float(value), interval)
        for fraction, size, value, interval in zip(fractions, sizes, top1, intervals, strict=True)
    ]
    notes = []
    if num_measured < num_folds:
        notes.append(f"only {num_measured} of {num_folds} folds were left out, to save time")
    gains = []
    if fractions == FRACTIONS and labels.ndim == 1:
        gains = _find_gains(
            labels[is_out], correct[_HALF], correct[-1], clusters, class_names=class_names
        )
    if fractions != FRACTIONS:
        notes.append(f"at most {100 * fractions[-1]:.0f} % of the other photos were used")
    curve = curve.model_copy(
        update={"points": points, "gains": gains, "note": ", and ".join(notes) or None}
    )

    is_usable = sizes >= _MIN_IMAGES_A_CLASS * num_classes
    num_measured = correct.shape[1]
    num_errors = int((~correct[-1]).sum())
    if is_usable.sum() < _MIN_POINTS:
        what = "classes" if labels.ndim == 1 else "labels"
        return curve.give_up(f"{curve.num_images:,} photos in {num_classes} {what} are too few")
    if num_errors < _MIN_ERRORS:
        return curve.give_up(f"{num_errors} errors in {num_measured:,} photos are too few")
    forecast = forecast_twice(
        sizes[is_usable],
        1 - top1[is_usable],
        covariance[np.ix_(is_usable, is_usable)],
        num_measured=num_measured,
        num_images=curve.num_images,
    )
    return curve.model_copy(update={"forecast": forecast})


def _compute_covariance(correct: Bools, clusters: Ints) -> Floats:
    """Compute the covariance of the errors at several sizes, [P, P], over the clusters.

    Args:
        correct: True where an image that was left out is predicted correctly, [P, n].
        clusters: Group of each of these images, [n].
    """
    _, members = np.unique(clusters, return_inverse=True)
    counts = np.bincount(members)
    num_errors = np.stack([np.bincount(members, ~row) for row in correct], axis=1)
    errors = num_errors.sum(axis=0) / correct.shape[1]
    deviations = num_errors - np.outer(counts, errors)
    covariance: Floats = deviations.T @ deviations / correct.shape[1] ** 2
    # the groups are a sample, too: the factor of an unbiased variance
    return covariance * (len(counts) / max(len(counts) - 1, 1))


def forecast_twice(
    sizes: Floats, errors: Floats, covariance: Floats, *, num_measured: int, num_images: int
) -> Forecast:
    """Fit the power law, and continue it to twice as many images.

    The interval holds 95 % of the forecasts from errors that are drawn with their covariance, since
    those of all sizes are measured on the same images. It is widened by the error that the law
    makes at the largest size if it is fitted to the sizes up to half of that.

    Args:
        sizes: Images that the probes were fitted on, [P].
        errors: Their errors on images that were left out, [P].
        covariance: Covariance of the errors, [P, P].
        num_measured: Images that were left out.
        num_images: Number of all images.
    """
    # inverse variances; without a bound an error of 0 would have all of the weight
    weights = 1 / np.maximum(errors * (1 - errors), 1 / num_measured)

    rng = np.random.default_rng(0)
    draws = rng.multivariate_normal(errors, covariance, _NUM_DRAWS, method="eigh")
    a, b, c = _fit_power_law(sizes, np.stack([errors, *draws.clip(0, 1)]), weights)
    top1 = 1 - a - b * (2.0 * num_images) ** -c
    is_half = sizes <= _HALF_SLACK * sizes[-1]
    # the law itself may be wrong, which the spread of the images doesn't show
    if is_half.sum() >= _MIN_BACKTEST_POINTS:
        half = _fit_power_law(sizes[is_half], errors[None, is_half], weights[is_half])
        miss = half[0] + half[1] * sizes[-1] ** -half[2] - errors[-1]
        top1[1:] += np.abs(miss) * rng.standard_normal(_NUM_DRAWS)
    top1 = top1.clip(0, 1)
    low, high = np.quantile(top1[1:], [SIGNIFICANCE / 2, 1 - SIGNIFICANCE / 2])
    return Forecast(
        num_images=2 * num_images,
        top1=float(top1[0]),
        interval=(float(min(low, top1[0])), float(max(high, top1[0]))),
        top1_now=float(1 - a[0] - b[0] * num_images ** -c[0]),
        a=float(a[0]),
        b=float(b[0]),
        c=float(c[0]),
    )


def _fit_power_law(sizes: Floats, errors: Floats, weights: Floats) -> Floats:
    """Fit a + b·n^−c with a ≥ 0 and b ≥ 0 by weighted least squares.

    For each c of a grid, a and b are known in closed form. scipy's curve_fit finds the same law and
    takes 4 ms for each of the hundreds of rows; all of them take 20 ms here.

    Args:
        sizes: Numbers of images n, [P].
        errors: Errors at these sizes, [R, P]; each row is fitted on its own.
        weights: Weights of the sizes, [P].

    Returns:
        a, b and c of each row, [3, R].
    """
    roots = np.sqrt(weights)
    least = np.full(len(errors), np.inf)
    fitted = np.zeros((3, len(errors)))
    for c in _EXPONENTS:
        # 1 at the largest size
        powers = (sizes / sizes[-1]) ** -c
        # If a or b would be negative, it is 0 and the other one is fitted alone.
        for uses in ([1, 1], [0, 1], [1, 0]):
            basis = np.stack([np.ones_like(powers), powers]) * np.array(uses)[:, None]
            coefficients = (errors * roots) @ np.linalg.pinv(basis * roots) * uses
            loss = (errors - coefficients @ basis) ** 2 @ weights
            a, b = coefficients.T
            is_better = (loss < least) & (np.minimum(a, b) >= 0)
            least[is_better] = loss[is_better]
            law = np.stack([a, b * sizes[-1] ** c, np.full_like(a, c)])
            fitted[:, is_better] = law[:, is_better]
    return fitted


def _fit_parts(
    values: Floats,
    labels: NDArray[Any],
    folds: Ints,
    clusters: Ints,
    fractions: Sequence[float],
    *,
    strength: float,
    balanced: Balance,
) -> tuple[Floats, NDArray[Any]]:
    """Fit probes to each fraction of the images outside each fold.

    Returns:
        Mean number of images that the probes were fitted on, [P], and whether they predict each
        image that was left out correctly, [P, n]; of labels the logits, [P, n, C].
    """
    rng = np.random.default_rng(0)
    sizes = np.zeros(len(fractions))
    several = labels.ndim == 2
    strata = number_label_sets(labels) if several else labels
    answers = np.zeros((len(fractions), *labels.shape), dtype=np.float32 if several else bool)
    num_folds = folds.max() + 1
    for fold in range(num_folds):
        is_out = folds == fold
        inside = np.flatnonzero(~is_out)
        places = _compute_places(strata[inside], clusters[inside], rng)
        for column, fraction in enumerate(fractions):
            chosen = inside[places < fraction]
            ((weight, bias, classes),) = fit_path(
                values[chosen], labels[chosen], [strength], balanced=balanced
            )
            logits = values[is_out] @ weight.T + bias
            if not several:
                logits = classes[logits.argmax(axis=1)] == labels[is_out]
            answers[column, is_out] = logits
            sizes[column] += len(chosen) / num_folds
    return sizes, answers


def _compute_places(labels: Ints, clusters: Ints, rng: np.random.Generator) -> Floats:
    """Return the position of each image, 0 to 1, in a random order of its class.

    Clusters stay together. Images with positions below a fraction are a stratified sample, and that
    of a smaller fraction is a part of it. Every sample has images of all classes.
    """
    _, first, members = np.unique(clusters, return_index=True, return_inverse=True)
    cluster_sizes = np.bincount(members)
    cluster_labels = labels[first]
    places = np.zeros(len(first))
    for label in np.unique(cluster_labels):
        shuffled = rng.permutation(np.flatnonzero(cluster_labels == label))
        sizes = cluster_sizes[shuffled]
        places[shuffled] = (np.cumsum(sizes) - sizes / 2) / sizes.sum()
        # no sample lacks a class, however small its fraction is
        places[shuffled[0]] = 0
    # Nor does it lack a class that shares all of its clusters with others.
    for label in np.unique(labels):
        shared = members[labels == label]
        if places[shared].min() > 0:
            places[shared[0]] = 0
    return places[members]


def _find_gains(
    labels: Ints, by_half: Bools, by_all: Bools, clusters: Ints, *, class_names: Sequence[str]
) -> list[ClassGain]:
    """Find the classes whose recall rises significantly, the largest rise first.

    McNemar's exact test compares the images of a class, or the sign test its groups. About 5 % of
    the classes found are due to chance (Benjamini and Hochberg 1995).
    """
    # scipy.stats takes half a second to import
    from scipy.stats import false_discovery_control

    gains = []
    p_values = []
    for label in np.unique(labels):
        is_in_class = labels == label
        half, all_images = by_half[is_in_class], by_all[is_in_class]
        changes = np.bincount(clusters[is_in_class], all_images.astype(int) - half)
        p_values.append(compute_mcnemar(int((changes > 0).sum()), int((changes < 0).sum())))
        gains.append(ClassGain(class_names[label], float(half.mean()), float(all_images.mean())))
    is_found = false_discovery_control(p_values) < SIGNIFICANCE
    found = [gain for gain in compress(gains, is_found) if gain.difference > 0]
    return sorted(found, key=lambda gain: -gain.difference)[:_MAX_GAINS]
