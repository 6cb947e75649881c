"""A linear probe: scikit-learn's logistic regression on the features of one of a model's last
blocks, as one linear layer. Where images have several labels, each label has a regression.

Which block's features serve a new task best is not known beforehand: the last ones are the most
specialised in what the weights were trained for (Yosinski et al. 2014, arXiv 1411.1792).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from vit.data.statistics import compute_class_weights
from vit.model.logits import Readout
from vit.prediction.batch_predictor import Features
from vit.training.folds import Folds, Labels, assign_folds, train_on_whole_classes

FloatArray = NDArray[np.float64]

# Blocks whose features are tried, counted from the last one, and the images that choose one.
_NUM_BLOCKS = 4
_MAX_IMAGES = 1000
_MIN_IMAGES_A_CLASS = 10
# Strengths, C of scikit-learn's LogisticRegression; a block is chosen at the second one.
_STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0)
# Bias of a class without training images, which makes its probability negligible.
_ABSENT_BIAS = -30.0


@dataclass(frozen=True)
class LinearProbe:
    """A linear layer on one block's pooled features."""

    readout: Readout
    # C of scikit-learn's LogisticRegression, the inverse of its penalty
    strength: float
    # for features as they are: the standardisation is folded in
    weight: Float[np.ndarray, "C D"]
    bias: Float[np.ndarray, " C"]
    # on left-out images, 0 to 1; of labels the mean average precision; None: there were too few
    accuracy: float | None = None

    def compute_logits(self, features: Float[np.ndarray, "n D"]) -> Float[np.ndarray, "n C"]:
        """Compute the logits, float64, of features at `readout`."""
        logits: FloatArray = np.asarray(features, dtype=np.float64) @ self.weight.T + self.bias
        return logits


def fit_probe(
    features: Features, labels: Labels, folds: Folds, *, num_classes: int, balanced: bool = False
) -> LinearProbe:
    """Choose readout and strength by the log loss over the folds, and fit on all images. A class
    without images gets a negligible probability. `balanced`: see `compute_class_weights`."""
    several = labels.ndim == 2
    if len(np.unique(labels, axis=0)) < 2:
        raise ValueError("a probe needs training images of different classes or labels")
    # Without images to measure on: the last block, as it was trained. With one class to measure
    # on, the probe that always predicts it would be the best.
    readout, strength, accuracy = list(features)[-1], _STRENGTHS[1], None
    is_measured = folds.max() >= 1 and (several or len(np.unique(labels[folds >= 0])) > 1)

    def measure(readout: Readout, chosen: Any, strength: float) -> tuple[float, float]:
        values = features[readout].double().numpy()[chosen]
        return _measure(values, labels[chosen], folds[chosen], strength, balanced)

    # The matrices are small, and several threads would wait for one another.
    with threadpool_limits(1):
        if is_measured:
            count = labels.shape[1] if several else len(np.unique(labels))
            order = np.random.default_rng(0).permutation(len(labels))
            sample = np.sort(order[: max(_MAX_IMAGES, _MIN_IMAGES_A_CLASS * count)])
            depths = sorted({depth for depth, _ in features})[-_NUM_BLOCKS:]
            last = [each for each in features if each[0] in depths]
            readout = min(last, key=lambda each: measure(each, sample, strength)[0])
            tried = {c: measure(readout, slice(None), c) for c in _STRENGTHS}
            strength = min(tried, key=lambda c: tried[c][0])
            accuracy = tried[strength][1]
        values = features[readout].double().numpy()
        weight, bias = _fit_regression(values, labels, strength, num_classes, balanced)
    return LinearProbe(readout, strength, weight, bias, accuracy)


def predict_left_out(
    features: Features,
    labels: Labels,
    folds: Folds,
    fold: int,
    *,
    num_classes: int,
    groups: Sequence[str] | None,
    balanced: bool = False,
) -> FloatArray:
    """Predict the images of a fold by a probe of the others. These choose the block, the pooling and
    the strength anew, so that nothing of the logits [n, C] has seen the images or their groups."""
    is_out = folds == fold
    known = np.flatnonzero(~is_out)
    # The folds of the other images serve to choose by, unless only one of two is left.
    inner_folds = folds[known] - (folds[known] > fold)
    inner_folds = train_on_whole_classes(inner_folds, labels[known])
    if inner_folds.max() < 1:
        inner_groups = None if groups is None else [groups[index] for index in known.tolist()]
        inner_folds = assign_folds(labels[known], inner_groups)
    known_features = {readout: values[known] for readout, values in features.items()}
    probe = fit_probe(
        known_features, labels[known], inner_folds, num_classes=num_classes, balanced=balanced
    )
    return probe.compute_logits(features[probe.readout][is_out].numpy())


def _measure(
    values: FloatArray, labels: NDArray[Any], folds: Folds, strength: float, balanced: bool
) -> tuple[float, float]:
    """Predict the images of each fold by the regression of the others. Returns their mean log loss
    and accuracy; of labels the mean binary cross-entropy, weighted as in the fit, and the mean
    average precision."""
    # scikit-learn takes a second to import
    from sklearn.metrics import average_precision_score

    num_classes = labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1
    logits = np.zeros((len(labels), num_classes))
    for fold in np.unique(folds[folds >= 0]):
        is_out = folds == fold
        weight, bias = _fit_regression(
            values[~is_out], labels[~is_out], strength, num_classes, balanced
        )
        logits[is_out] = values[is_out] @ weight.T + bias
    logits, answers = logits[folds >= 0], labels[folds >= 0]
    if labels.ndim == 1:
        log_probabilities = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        losses = -log_probabilities[np.arange(len(answers)), answers]
        return float(losses.mean()), float((logits.argmax(axis=1) == answers).mean())
    losses = np.logaddexp(0, np.where(answers, -logits, logits))
    if balanced:
        losses = np.where(answers, compute_class_weights(labels, num_classes), 1.0) * losses
    varies = _vary(answers)
    precision = average_precision_score(answers[:, varies], logits[:, varies])
    return float(losses[:, _vary(labels)].mean()), float(precision)


def _fit_regression(
    values: FloatArray, labels: Labels, strength: float, num_classes: int, balanced: bool
) -> tuple[FloatArray, FloatArray]:
    """Fit a logistic regression on standardised features, or one for each label. Returns weight
    [C, D] and bias [C] for features that are not standardised."""
    # scikit-learn takes a second to import
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    def fit(targets: NDArray[Any], class_weight: Any) -> Any:
        model = LogisticRegression(C=strength, max_iter=1000, class_weight=class_weight)
        return model.fit(standardised, targets)

    scaler = StandardScaler()
    standardised = scaler.fit_transform(values)
    weight = np.zeros((num_classes, values.shape[1]))
    bias = np.zeros(num_classes)
    if labels.ndim == 2:
        # Half an image more with and without each label keeps the frequency from 0 and 1.
        positives = labels.sum(axis=0) + 0.5
        bias = np.log(positives / (len(labels) + 1 - positives))
        factors = compute_class_weights(labels, num_classes) if balanced else np.ones(num_classes)
        for place in np.flatnonzero(_vary(labels)):
            model = fit(labels[:, place], {True: float(factors[place])})
            weight[place], bias[place] = model.coef_[0], model.intercept_[0]
    else:
        model = fit(labels, "balanced" if balanced else None)
        fitted = np.column_stack([model.coef_, model.intercept_])
        if len(fitted) == 1:
            # For two classes scikit-learn has one logit, that of the second class.
            fitted = np.concatenate([-fitted, fitted]) / 2
        bias += fitted[:, -1].min() + _ABSENT_BIAS
        weight[model.classes_], bias[model.classes_] = fitted[:, :-1], fitted[:, -1]
    weight = weight / scaler.scale_
    return weight, bias - weight @ scaler.mean_


def _vary(labels: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which labels some images have and others lack, [C]."""
    varies: NDArray[np.bool_] = np.logical_xor(labels.any(axis=0), labels.all(axis=0))
    return varies
