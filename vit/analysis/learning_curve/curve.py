"""How a linear probe's accuracy grows with the number of its training images, and what twice as many
would bring.

Errors of classifiers fall with the number of training images n about as a + b·n^−c, an inverse power
law (Cortes et al. 1993, "Learning curves: asymptotic values and rate of convergence"; Figueroa et
al. 2012, "Predicting sample size required for classification performance").
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from vit.evaluation.intervals import compute_clustered_interval
from vit.evaluation.significance import SIGNIFICANCE, compute_mcnemar
from vit.prediction.features import Features
from vit.prediction.probabilities import Floats, Ints
from vit.runtime.documents import check_schema, read_json
from vit.runtime.files import write_json
from vit.training.cross_validation import assign_group_folds, number_groups
from vit.training.linear_probe import NUM_FOLDS, LinearProbe, as_array, assign_folds, fit_path

LEARNING_CURVE_FILE = "learning_curve.json"

# of the training images; from half to all tells which classes gain
FRACTIONS = (0.1, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0)
_HALF = FRACTIONS.index(0.5)
# features × classes × images of all regressions: at most about ten seconds of one core, where 20 to 80
# nanoseconds a value were measured
_MAX_VALUES = 300_000_000
# below these the fit is not determined
_MIN_POINTS = 4
_MIN_IMAGES_A_CLASS = 5
_MIN_ERRORS = 5
# of the power law: 0 would be a logarithm, which has no limit, and 1 is the rate at which a model
# with a fixed number of weights comes to its limit
_EXPONENTS = np.geomspace(0.1, 1.0, 60)
_NUM_DRAWS = 1000
# of the largest size, by which half of it is rounded to whole images
_HALF_SLACK = 0.55
# the power law has three parameters
_MIN_BACKTEST_POINTS = 3
_MAX_GAINS = 5
_MAX_NAMES = 3

Bools = NDArray[np.bool_]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(gt=0, lt=2**53)]


@dataclass(frozen=True)
class CurvePoint:
    """The accuracy of probes of a part of the images, on images that they were not fitted on."""

    # of the images that weren't left out
    fraction: Share
    # that a probe was fitted on, mean over the folds
    num_images: Count
    top1: Share
    # 95 %, clustered by group
    interval: tuple[Share, Share]


@dataclass(frozen=True)
class Forecast:
    """What the power law a + b·n^−c gives for all images and for twice as many."""

    num_images: Count
    top1: Share
    # 95 %
    interval: tuple[Share, Share]
    # of as many images as there are
    top1_now: Share
    a: Share
    b: Annotated[float, Field(ge=0, lt=1e18)]
    c: Annotated[float, Field(ge=0, lt=10)]

    def compute_top1(self, num_images: float) -> float:
        """The accuracy that the power law gives for so many images."""
        return float(1 - self.a - self.b * num_images**-self.c)


@dataclass(frozen=True)
class ClassGain:
    """A class whose recall rose from half to all of the images by more than chance would have it."""

    name: str
    recall_half: Share
    recall_all: Share

    @property
    def difference(self) -> float:
        """0 to 1."""
        return self.recall_all - self.recall_half


class LearningCurve(BaseModel):
    """What `learning_curve.json` holds. Accuracies and recalls are from 0 to 1."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    schema_version: int = 1
    # that the probe was fitted on
    num_images: Count
    # None: each image is its own
    num_groups: int | None
    # in which images were left out
    num_folds: int
    # smallest first
    points: list[CurvePoint]
    # None where the points don't determine it, for this reason
    forecast: Forecast | None = None
    reason: str | None = None
    # largest first
    gains: list[ClassGain] = []
    # what was left out to save time
    note: str | None = None

    def give_up(self, reason: str) -> "LearningCurve":
        """The same without a forecast, for a reason."""
        return self.model_copy(update={"reason": reason})

    def save(self, directory: Path) -> None:
        """Write learning_curve.json into a run's directory."""
        write_json(directory / LEARNING_CURVE_FILE, self.model_dump(mode="json"))

    def describe(self) -> str:
        """The forecast in a sentence."""
        forecast = self.forecast
        if forecast is None:
            return f"Whether more photos would help: {self.reason}."
        # whole per cents would hide what is still to be gained
        digits = int(min(forecast.top1_now, forecast.top1) >= 0.95)
        now = f"{forecast.top1_now:.{digits}%}"
        expected = f"{forecast.top1:.{digits}%}"
        low, high = forecast.interval
        interval = f"{100 * low:.{digits}f}–{high:.{digits}%}"
        share = f"about {expected} ({interval}) instead of {now}"
        if now == expected:
            share = f"about as many as now, {expected} ({interval}),"
        gains = ""
        if self.gains:
            *names, last = [gain.name for gain in self.gains[:_MAX_NAMES]]
            listed = f"{', '.join(names)} and {last}" if names else last
            gains = f"; {listed} would gain most"
        return (
            f"With twice as many photos ({forecast.num_images:,}) {share} are expected to be"
            f" classified correctly, a forecast from the learning curve of a linear probe{gains}."
        )


def measure_learning_curve(
    features: Features,
    labels: Ints,
    probe: LinearProbe,
    *,
    class_names: Sequence[str],
    groups: Sequence[str] | None = None,
    balanced: bool = False,
    max_values: int = _MAX_VALUES,
) -> LearningCurve:
    """Fit a probe again on parts of its images, and measure each on images that were left out.

    Args:
        features: Of the images that the probe was fitted on.
        labels: Of the same images.
        probe: Its readout and its strength are kept.
        class_names: Of the labels.
        groups: Of each image; one group is left out, or added, as a whole. None: each its own.
        balanced: As of `fit_probe`.
        max_values: Features × classes × images of all regressions; folds, and then the largest
            parts, are left out where there would be more.

    Returns:
        The curve; without points where no image can be left out or it would take too long, without
        a forecast where the points don't determine one.
    """
    folds = assign_folds(labels)
    if groups is not None:
        folds = assign_group_folds(labels, groups, num_folds=NUM_FOLDS)
    clusters = number_groups(groups, len(labels))
    num_folds = int(folds.max()) + 1
    curve = LearningCurve(
        num_images=len(labels),
        num_groups=None if groups is None else len(set(groups)),
        num_folds=num_folds,
        points=[],
    )
    if num_folds < 2:
        return curve.give_up("too few photos to leave any out")

    values = as_array(features, probe.readout)
    # of a regression on all that isn't left out
    num_values = values.size * len(class_names) * (1 - 1 / num_folds)
    num_measured, fractions = _choose_parts(max_values / num_values, num_folds)
    if len(fractions) < _MIN_POINTS:
        return curve.give_up(f"it would take too long to measure with {len(labels):,} photos")

    with threadpool_limits(1):
        sizes, correct = _fit_parts(
            values,
            labels,
            np.where(folds < num_measured, folds, -1),
            clusters,
            fractions=fractions,
            strength=probe.strength,
            balanced=balanced,
        )
    is_out = (folds >= 0) & (folds < num_measured)
    correct = correct[is_out]
    clusters = clusters[is_out]
    points = [
        CurvePoint(
            fraction=fraction,
            num_images=round(sizes[column]),
            top1=float(correct[:, column].mean()),
            interval=compute_clustered_interval(correct[:, column], clusters),
        )
        for column, fraction in enumerate(fractions)
    ]
    note = None
    if num_measured < num_folds:
        note = f"to save time, {num_measured} of {num_folds} folds were left out in turn"
    gains = []
    if len(fractions) == len(FRACTIONS):
        gains = _find_gains(
            labels[is_out], correct[:, _HALF], correct[:, -1], clusters, class_names=class_names
        )
    else:
        note = f"{note}, and at most {fractions[-1]:.0%} of the others fitted on"
    curve = curve.model_copy(update={"points": points, "gains": gains, "note": note})

    is_usable = sizes >= _MIN_IMAGES_A_CLASS * len(np.unique(labels))
    num_errors = int((~correct[:, -1]).sum())
    if is_usable.sum() < _MIN_POINTS:
        return curve.give_up(
            f"not enough points to tell, of {len(labels):,} photos in {len(class_names)} classes"
        )
    if num_errors < _MIN_ERRORS:
        return curve.give_up(f"too few errors to tell, {num_errors} of {len(correct):,} photos")
    forecast = forecast_twice(
        sizes[is_usable], correct[:, is_usable], clusters, num_images=len(labels)
    )
    return curve.model_copy(update={"forecast": forecast})


def _choose_parts(max_fits: float, num_folds: int) -> tuple[int, tuple[float, ...]]:
    """The number of folds to leave out, and the fractions of the others to fit on, smallest first,
    that together take no longer than `max_fits` regressions on all of the others."""
    num_measured = int(max_fits / sum(FRACTIONS))
    if num_measured > 0:
        return min(num_measured, num_folds), FRACTIONS
    is_affordable = np.cumsum(FRACTIONS) <= max_fits
    return 1, FRACTIONS[: int(is_affordable.sum())]


def forecast_twice(sizes: Floats, correct: Bools, clusters: Ints, *, num_images: int) -> Forecast:
    """Fit the power law, and go on with it to twice as many images.

    The interval has 95 % of the forecasts from errors drawn with the covariance that the measured
    ones have, by which images were left out: those of all sizes are of the same images. It is widened
    by how far the law misses the largest size where it is fitted on sizes up to half of that.

    Args:
        sizes: Images that were fitted on, [P].
        correct: Of each image that was left out, [n, P].
        clusters: Of the same images, a number for each.
        num_images: All there are.
    """
    wrong = (~correct).astype(np.float64)
    errors = wrong.mean(axis=0)
    _, members = np.unique(clusters, return_inverse=True)
    num_clusters = int(members.max()) + 1
    residuals = np.zeros((num_clusters, len(sizes)))
    np.add.at(residuals, members, wrong - errors)
    covariance = residuals.T @ residuals / len(wrong) ** 2
    covariance *= num_clusters / max(num_clusters - 1, 1)

    rng = np.random.default_rng(0)
    draws = rng.multivariate_normal(errors, covariance, _NUM_DRAWS, method="eigh")
    weights = 1 / np.maximum(errors * (1 - errors), 1 / len(wrong))
    a, b, c = _fit_power_law(sizes, np.stack([errors, *draws.clip(0, 1)]), weights)
    top1 = 1 - a - b * (2.0 * num_images) ** -c
    num_half = int((sizes <= _HALF_SLACK * sizes[-1]).sum())
    if num_half >= _MIN_BACKTEST_POINTS:
        a_half, b_half, c_half = _fit_power_law(
            sizes[:num_half], errors[None, :num_half], weights[:num_half]
        )
        miss = (a_half + b_half * sizes[-1] ** -c_half - errors[-1]).item()
        top1[1:] += abs(miss) * rng.standard_normal(_NUM_DRAWS)
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


def load_learning_curve(directory: Path) -> LearningCurve | None:
    """The curve in a run's directory; None where there is none.

    Raises:
        ValueError: the file is damaged.
    """
    path = directory / LEARNING_CURVE_FILE
    if not path.is_file():
        return None
    return check_schema(LearningCurve, read_json(path), origin=str(path))


def _fit_parts(
    values: Floats,
    labels: Ints,
    folds: Ints,
    clusters: Ints,
    *,
    fractions: Sequence[float],
    strength: float,
    balanced: bool,
) -> tuple[Floats, Bools]:
    """Of each fraction the mean number of images that the probes were fitted on, [P], and whether
    they were right on each image that was left out, [n, P]."""
    rng = np.random.default_rng(0)
    sizes = np.zeros(len(fractions))
    correct = np.zeros((len(labels), len(fractions)), dtype=bool)
    num_folds = folds.max() + 1
    for fold in range(num_folds):
        is_out = folds == fold
        inside = np.flatnonzero(~is_out)
        places = _compute_places(labels[inside], clusters[inside], rng)
        for column, fraction in enumerate(fractions):
            chosen = inside[places < fraction]
            ((weight, bias, classes),) = fit_path(
                values[chosen], labels[chosen], [strength], balanced=balanced
            )
            logits = values[is_out] @ weight.T + bias
            correct[is_out, column] = classes[logits.argmax(axis=1)] == labels[is_out]
            sizes[column] += len(chosen) / num_folds
    return sizes, correct


def _compute_places(labels: Ints, clusters: Ints, rng: np.random.Generator) -> Floats:
    """Of each image the share of its class that comes before it, in an order of whole clusters: those
    below a fraction are a stratified sample, of which the sample of a smaller fraction is a part."""
    _, first, members = np.unique(clusters, return_index=True, return_inverse=True)
    cluster_sizes = np.bincount(members)
    cluster_labels = labels[first]
    places = np.zeros(len(first))
    for label in np.unique(cluster_labels):
        shuffled = rng.permutation(np.flatnonzero(cluster_labels == label))
        sizes = cluster_sizes[shuffled]
        middles = np.cumsum(sizes) - sizes / 2
        places[shuffled] = middles / sizes.sum()
        # no sample is without the class
        places[shuffled[0]] = 0
    return places[members]


def _fit_power_law(sizes: Floats, errors: Floats, weights: Floats) -> tuple[Floats, Floats, Floats]:
    """a ≥ 0, b ≥ 0 and c of a + b·n^−c by weighted least squares: for each c of a grid a and b are
    known in closed form.

    Args:
        sizes: n, [P].
        errors: [R, P], each row fitted on its own.
        weights: [P].

    Returns:
        a, b and c, [R] each.
    """
    best = np.full(len(errors), np.inf)
    fitted = np.zeros((3, len(errors)))
    for c in _EXPONENTS:
        # 1 at the largest size
        powers = (sizes / sizes[-1]) ** -c
        total = weights.sum()
        first = weights @ powers
        second = weights @ powers**2
        error_sum = errors @ weights
        product_sum = errors @ (weights * powers)
        b = (total * product_sum - first * error_sum) / (total * second - first**2)
        a = (error_sum - b * first) / total
        # where one would be negative it is 0, and the other fitted alone
        b = np.where(a < 0, product_sum / second, b)
        a = np.where(a < 0, 0, a)
        a = np.where(b < 0, error_sum / total, a)
        b = np.where(b < 0, 0, b)

        residuals = errors - a[:, None] - b[:, None] * powers
        loss = residuals**2 @ weights
        is_better = loss < best
        best[is_better] = loss[is_better]
        row = np.stack([a, b * sizes[-1] ** c, np.full(len(errors), c)])
        fitted[:, is_better] = row[:, is_better]
    a, b, c = fitted
    return a, b, c


def _find_gains(
    labels: Ints, by_half: Bools, by_all: Bools, clusters: Ints, *, class_names: Sequence[str]
) -> list[ClassGain]:
    """The classes whose recall rose by more than chance would have it, largest rise first: by
    McNemar's exact test of the images, or the sign test of the groups, that changed; 5 % of the
    classes found may be chance (Benjamini and Hochberg 1995)."""
    changes = by_all.astype(np.int64) - by_half
    present = np.unique(labels)
    p_values = []
    for label in present:
        in_class = labels == label
        cluster_changes = np.bincount(clusters[in_class], changes[in_class])
        better = int((cluster_changes > 0).sum())
        worse = int((cluster_changes < 0).sum())
        p_values.append(compute_mcnemar(better, worse))
    # scipy.stats takes half a second to import
    from scipy.stats import false_discovery_control

    adjusted = false_discovery_control(p_values)
    gains = [
        ClassGain(
            name=class_names[label],
            recall_half=float(by_half[labels == label].mean()),
            recall_all=float(by_all[labels == label].mean()),
        )
        for label, p_value in zip(present, adjusted, strict=True)
        if p_value < SIGNIFICANCE
    ]
    gains = [gain for gain in gains if gain.difference > 0]
    return sorted(gains, key=lambda gain: -gain.difference)[:_MAX_GAINS]
