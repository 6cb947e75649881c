"""A linear probe: the block, the pooling and the strength of a regularised logistic regression on
pooled features, chosen by cross-validation, as one linear layer. Where images have several labels,
there is a regression for each label.

Which block's features serve a new task best is not known beforehand: the last ones are the most
specialised in what the weights were trained for (Yosinski et al. 2014, arXiv 1411.1792).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from scipy.special import expit
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from vit.data.statistics import compute_class_weights
from vit.evaluation.metrics import compute_metrics, score_logits
from vit.model.logits import Readout
from vit.prediction.features import Features
from vit.training.folds import assign_folds

FloatArray = NDArray[np.float64]
# True weights each class by the inverse of its number of images, and of labels the images that have
# them, see `compute_class_weights`; a dictionary has the weight of each label.
Balance = bool | dict[int, float]

# Strengths, C of scikit-learn's LogisticRegression. All are tried for the best readout, every third
# for the others.
_STRENGTHS = tuple(float(strength) for strength in 10.0 ** np.arange(-4, 1.5, 0.5))
_COARSE_STRENGTHS = _STRENGTHS[2::3]
# Readouts that are left after least squares. With 4 × 200 photos and the 24 readouts of a ViT-S/14
# the logistic regressions have the same best two.
_NUM_CANDIDATES = 4
_PENALTIES = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5)
# Features × classes × images by which the readout is chosen: seconds of one core.
_MAX_VALUES = 8_000_000
_MIN_IMAGES_A_CLASS = 10
# Bias of a class without training images, which makes its probability negligible.
ABSENT_BIAS = -30.0
# Largest component of the gradient of the mean loss where regressions of labels end. The
# coefficients are then those of scikit-learn to 1e-6 where the regularisation is not the weakest.
_TOLERANCE = 1e-8


@dataclass(frozen=True)
class LinearProbe:
    """A linear layer on one block's pooled features.

    Attributes:
        readout: Block of the features, and their pooling.
        strength: C of scikit-learn's `LogisticRegression`, the inverse of its penalty.
        weight: [C, D], for features as they are: the standardisation is folded in.
        bias: [C].
        top1: Accuracy on left-out training images, 0 to 1; None where there were too few, or where
            images have several labels.
        map: Mean average precision of the labels on these images, 0 to 1; None for classes.
    """

    readout: Readout
    strength: float
    weight: Float[np.ndarray, "C D"]
    bias: Float[np.ndarray, " C"]
    top1: float | None
    map: float | None = None

    def compute_logits(self, features: Float[np.ndarray, "n D"]) -> Float[np.ndarray, "n C"]:
        """Compute the logits, float64, of features at `readout`."""
        logits: FloatArray = np.asarray(features, dtype=np.float64) @ self.weight.T + self.bias
        return logits


def fit_probe(
    features: Features,
    labels: Int[np.ndarray, " n"] | Bool[np.ndarray, "n C"],
    *,
    num_classes: int,
    balanced: Balance = False,
    folds: Int[np.ndarray, " n"] | None = None,
    groups: Sequence[str] | None = None,
) -> LinearProbe:
    """Choose readout and strength by the cross-validated log loss, and fit on all images.

    Args:
        features: Features of the training images, at each readout.
        labels: Labels of the same images, 0 to C − 1; or which labels each image has.
        num_classes: C; a class without images gets a negligible probability.
        balanced: Give all classes the same weight, whatever their numbers of images, or these
            weights by label.
        folds: Number of the fold that leaves out each image, −1 for an image that never is. None:
            see `assign_folds`.
        groups: Group of each image; no group is measured by a probe that has seen a part of it.
            None: each image is its own group.

    Raises:
        ValueError: Fewer than two classes have images, or no label is on some images alone.
    """
    several = labels.ndim == 2
    if several and not _vary(labels).any():
        raise ValueError("a probe needs a label that some training images have and others lack")
    if not several and len(np.unique(labels)) < 2:
        raise ValueError("a probe needs training images of at least two classes")
    if folds is None:
        folds = assign_folds(labels, groups)
    # With one class to measure on, the probe that always predicts it would be the best.
    if not several and groups is not None and len(np.unique(labels[folds >= 0])) < 2:
        folds = np.full(len(labels), -1)
    # The matrices are small, and several threads would wait for one another, longer if other
    # programs run.
    with threadpool_limits(1):
        # If no image can be left out: the last block, as it was trained.
        readout = list(features)[-1]
        strength = 1e-2
        accuracy = None
        if folds.max() >= 1:
            readout = _choose_readout(
                features,
                labels,
                folds,
                num_classes=num_classes,
                balanced=balanced,
                by_fold=groups is not None,
            )
            losses, accuracies = _cross_validate(
                as_array(features, readout), labels, folds, strengths=_STRENGTHS, balanced=balanced
            )
            best = int(losses.argmin())
            strength = _STRENGTHS[best]
            accuracy = float(accuracies[best])

        values = as_array(features, readout)
        ((fitted_weight, fitted_bias, classes),) = fit_path(
            values, labels, [strength], balanced=balanced
        )
    weight = np.zeros((num_classes, values.shape[1]))
    weight[classes] = fitted_weight
    bias = np.full(num_classes, fitted_bias.min() + ABSENT_BIAS)
    bias[classes] = fitted_bias
    if several:
        return LinearProbe(readout, strength, weight, bias, top1=None, map=accuracy)
    return LinearProbe(readout, strength, weight, bias, top1=accuracy)


def _choose_readout(
    features: Features,
    labels: NDArray[Any],
    folds: NDArray[np.int64],
    *,
    num_classes: int,
    balanced: Balance,
    by_fold: bool,
) -> Readout:
    """Return the readout with the smallest loss at its best strength. With many images a sample
    decides, and only readouts that do best by least squares, which are faster, are tried. These
    leave out one image at a time, or one fold (`by_fold`)."""
    width = next(iter(features.values())).shape[1]
    max_images = _MAX_VALUES // (width * num_classes)
    # The sample has equally many images of each class, and of labels as many as there are.
    images_a_class = max(max_images // num_classes, _MIN_IMAGES_A_CLASS)
    rng = np.random.default_rng(0)
    parts = [np.arange(len(labels))]
    num_chosen = images_a_class * num_classes
    if labels.ndim == 1:
        parts = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        num_chosen = images_a_class
    sample = np.sort(np.concatenate([rng.permutation(part)[:num_chosen] for part in parts]))

    arrays = {readout: as_array(features, readout)[sample] for readout in features}
    ridge_folds = folds[sample] if by_fold else None
    errors = {
        readout: _compute_ridge_error(values, labels[sample], ridge_folds)
        for readout, values in arrays.items()
    }
    losses = {}
    for readout in sorted(errors, key=lambda readout: errors[readout])[:_NUM_CANDIDATES]:
        strength_losses, _ = _cross_validate(
            arrays[readout],
            labels[sample],
            folds[sample],
            strengths=_COARSE_STRENGTHS,
            balanced=balanced,
        )
        losses[readout] = strength_losses.min()
    return min(losses, key=lambda readout: losses[readout])


def _compute_ridge_error(
    features: FloatArray, labels: NDArray[Any], folds: NDArray[np.int64] | None
) -> float:
    """Compute the mean squared error of ridge regressions on the classes' indicators, each fold
    left out in turn, at the best of a few penalties; in closed form (Allen 1974, PRESS).

    Args:
        features: [n, D].
        labels: [n], or [n, C].
        folds: Number of the fold that leaves out each image, −1 for an image that never is. None:
            each image is left out alone.
    """
    standardised, _, _ = _standardise(features)
    targets = labels.astype(np.float64)
    if labels.ndim == 1:
        targets = np.eye(labels.max() + 1)[labels]
    targets -= targets.mean(axis=0)
    vectors, values, _ = np.linalg.svd(standardised, full_matrices=False)
    errors = []
    for penalty in _PENALTIES:
        shrinkage = values**2 / (values**2 + penalty)
        fitted = (vectors * shrinkage) @ (vectors.T @ targets)
        if folds is None:
            # the diagonal of the projection, with the intercept's
            leverage = (vectors**2) @ shrinkage + 1 / len(labels)
            residuals = (targets - fitted) / np.maximum(1 - leverage, 1e-9)[:, None]
        else:
            residuals = _leave_out_folds(targets - fitted, vectors, shrinkage, folds)
        errors.append((residuals**2).sum(axis=1).mean())
    return float(min(errors))


def _leave_out_folds(
    residuals: FloatArray,
    vectors: FloatArray,
    shrinkage: FloatArray,
    folds: NDArray[np.int64],
) -> FloatArray:
    """Return the residuals of the images that folds leave out, for regressions without their fold:
    (1 − H)⁻¹ r, where H is the block of the fold in the projection."""
    left_out = []
    for fold in range(folds.max() + 1):
        is_out = folds == fold
        # with the intercept's part of the projection
        block = (vectors[is_out] * shrinkage) @ vectors[is_out].T + 1 / len(folds)
        left_out.append(np.linalg.solve(np.eye(len(block)) - block, residuals[is_out]))
    return np.concatenate(left_out)


def _standardise(features: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the features with mean 0 and standard deviation 1, their mean and their standard
    deviation."""
    mean = features.mean(axis=0)
    std = features.std(axis=0)
    # A channel that never changes carries no information.
    std[std == 0] = 1
    return (features - mean) / std, mean, std


def _cross_validate(
    features: FloatArray,
    labels: NDArray[Any],
    folds: NDArray[np.int64],
    *,
    strengths: Sequence[float],
    balanced: Balance,
) -> tuple[FloatArray, FloatArray]:
    """Compute the mean log loss and the accuracy of each strength on images that were left out; of
    labels the mean binary cross-entropy, weighted as in the fit, and at the best
    strength the mean average precision."""
    if labels.ndim == 2:
        return _cross_validate_labels(
            features, labels, folds, strengths=strengths, balanced=balanced
        )
    losses = np.zeros(len(strengths))
    num_correct = np.zeros(len(strengths))
    for fold in range(folds.max() + 1):
        is_out = folds == fold
        out_labels = labels[is_out]
        path = fit_path(features[~is_out], labels[~is_out], strengths, balanced=balanced)
        for place, (weight, bias, classes) in enumerate(path):
            logits = features[is_out] @ weight.T + bias
            log_probabilities = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
            # An image whose class is left out as a whole is a mistake at every readout.
            known = np.flatnonzero(np.isin(out_labels, classes))
            columns = np.searchsorted(classes, out_labels[known])
            losses[place] -= log_probabilities[known, columns].sum()
            num_correct[place] += (classes[logits.argmax(axis=1)] == out_labels).sum()
    count = (folds >= 0).sum()
    return losses / count, num_correct / count


def _cross_validate_labels(
    features: FloatArray,
    labels: NDArray[np.bool_],
    folds: NDArray[np.int64],
    *,
    strengths: Sequence[float],
    balanced: Balance,
) -> tuple[FloatArray, FloatArray]:
    """See `_cross_validate`."""
    losses = np.zeros(len(strengths))
    count = 0
    logits = np.zeros((len(strengths), *labels.shape), dtype=np.float32)
    for fold in range(folds.max() + 1):
        is_out = folds == fold
        # A label that all other images lack, or have, is the same at every readout.
        known = _vary(labels[~is_out])
        signs = np.where(labels[is_out], -1.0, 1.0)
        weights = _weigh_labels(labels[~is_out], labels[is_out], balanced)
        path = fit_path(features[~is_out], labels[~is_out], strengths, balanced=balanced)
        for place, (weight, bias, _) in enumerate(path):
            logits[place, is_out] = features[is_out] @ weight.T + bias
            pairs = weights * np.logaddexp(0, signs * logits[place, is_out])
            losses[place] += pairs[:, known].sum()
        count += int(is_out.sum() * known.sum())
    measured = folds >= 0
    best = int(losses.argmin())
    precisions = np.full(len(strengths), np.nan)
    scores = score_logits(logits[best, measured], labels[measured])
    precisions[best] = compute_metrics(scores)["map"]
    return losses / max(count, 1), precisions


def _vary(labels: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which labels some images have and others lack, [C]."""
    varies: NDArray[np.bool_] = np.logical_xor(labels.any(axis=0), labels.all(axis=0))
    return varies


def _weigh_labels(
    fitted: NDArray[np.bool_], labels: NDArray[np.bool_], balanced: Balance
) -> FloatArray:
    """Return the weight of each pair of image and label, [n, C].

    Args:
        fitted: Labels of the images that a probe is fitted on.
        labels: Labels of the images that are weighted, [n, C].
        balanced: See `fit_probe`.
    """
    positive = np.ones(labels.shape[1])
    if isinstance(balanced, dict):
        positive = np.array([balanced[place] for place in range(labels.shape[1])])
    elif balanced:
        positive = compute_class_weights(fitted, labels.shape[1]).astype(np.float64)
    return np.where(labels, positive, 1.0)


def fit_path(
    features: FloatArray,
    labels: NDArray[Any],
    strengths: Sequence[float],
    *,
    balanced: Balance,
) -> list[tuple[FloatArray, FloatArray, NDArray[np.int64]]]:
    """Fit a logistic regression on standardised features for each strength, weakest first; or one
    for each label, where images may have several.

    Returns:
        Weight [C, D], bias [C] and classes [C] of each, for features that are not standardised.
    """
    # scikit-learn takes a second to import
    from sklearn.linear_model import LogisticRegression

    standardised, mean, std = _standardise(features)
    if labels.ndim == 2:
        weights = _weigh_labels(labels, labels, balanced)
        start = np.zeros((labels.shape[1], features.shape[1] + 1))
        fitted = []
        for strength in strengths:
            start = _fit_labels(standardised, labels, weights, strength=strength, start=start)
            weight = start[:, :-1] / std
            fitted.append((weight, start[:, -1] - weight @ mean, np.arange(len(start))))
        return fitted
    class_weight: str | dict[int, float] | None = None
    if isinstance(balanced, dict):
        class_weight = balanced
    elif balanced:
        class_weight = "balanced"
    # Each fit starts from the one before, which is near it.
    model = LogisticRegression(max_iter=1000, warm_start=True, class_weight=class_weight)
    path = []
    for strength in strengths:
        model.set_params(C=strength).fit(standardised, labels)
        weight, bias = model.coef_, model.intercept_
        if len(weight) == 1:
            # For two classes scikit-learn has one logit, that of the second class.
            weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
        weight = weight / std
        path.append((weight, bias - weight @ mean, model.classes_))
    return path


def _fit_labels(
    standardised: FloatArray,
    labels: NDArray[np.bool_],
    weights: FloatArray,
    *,
    strength: float,
    start: FloatArray,
) -> FloatArray:
    """Fit a logistic regression for each label, all of them together, by L-BFGS.

    Its objective is that of scikit-learn's `LogisticRegression`, which takes one label at a time. A
    label that all images have, or lack, gets no weights and a bias of its frequency.

    Args:
        standardised: Features, [n, D].
        labels: Which labels each image has, [n, C].
        weights: Weight of each pair of image and label, [n, C].
        strength: C of scikit-learn, the inverse of the penalty.
        start: Coefficients to start from, [C, D + 1]; the last is the bias.

    Returns:
        Coefficients, [C, D + 1].
    """
    from scipy.optimize import minimize

    count = len(labels)
    varies = np.flatnonzero(_vary(labels))
    signs = np.where(labels[:, varies], -1.0, 1.0)
    weights = weights[:, varies]
    shape = (len(varies), start.shape[1])

    def compute_loss(values: FloatArray) -> tuple[float, FloatArray]:
        coefficients = values.reshape(shape)
        weight = coefficients[:, :-1]
        margins = signs * (standardised @ weight.T + coefficients[:, -1])
        loss = (weights * np.logaddexp(0, margins)).sum() + (weight**2).sum() / (2 * strength)
        slopes = signs * weights * expit(margins)
        gradient = np.empty(shape)
        gradient[:, :-1] = slopes.T @ standardised + weight / strength
        gradient[:, -1] = slopes.sum(axis=0)
        return loss / count, gradient.ravel() / count

    found = minimize(
        compute_loss,
        start[varies].ravel(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 1000, "maxfun": 2000, "gtol": _TOLERANCE, "ftol": 0.0, "maxcor": 20},
    )
    coefficients = np.zeros(start.shape)
    # Half an image more with and without each label keeps the frequency from 0 and 1.
    positives = labels.sum(axis=0) + 0.5
    coefficients[:, -1] = np.log(positives / (count + 1 - positives))
    coefficients[varies] = found.x.reshape(shape)
    return coefficients


def as_array(features: Features, readout: Readout) -> FloatArray:
    """Return the features at one readout, float64 [n, D]."""
    values: FloatArray = features[readout].numpy().astype(np.float64)
    return values
