"""Cross-validation on features: each image is predicted by a probe that has seen neither it nor an
image of its group."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vit.evaluation.intervals import compute_clustered_interval
from vit.evaluation.metrics import compute_metrics, score_logits
from vit.prediction.features import Features
from vit.prediction.probabilities import Ints
from vit.training.linear_probe import assign_folds, fit_probe

CROSS_VALIDATION_FILE = "cross_validation.json"


@dataclass(frozen=True)
class FoldPrediction:
    """The out-of-fold prediction of an image."""

    path: str
    group: str | None
    fold: int
    label: str
    predicted: str
    # of the predicted class, 0 to 1
    probability: float


@dataclass(frozen=True)
class CrossValidation:
    """The out-of-fold predictions of every image, and what they are worth. Accuracies are from 0 to
    1."""

    num_folds: int
    num_images: int
    # None: each image is its own
    num_groups: int | None
    top1: float
    # 95 %, clustered by group
    interval: tuple[float, float]
    macro_f1: float
    majority: float
    chance: float
    predictions: list[FoldPrediction]

    def describe(self) -> str:
        """The result in a sentence."""
        low, high = self.interval
        clusters = "" if self.num_groups is None else f", by {self.num_groups:,} groups"
        return (
            f"{self.num_folds}-fold cross-validation of {self.num_images:,} images: top-1"
            f" {self.top1:.1%} ({100 * low:.1f}–{high:.1%} with 95 % confidence{clusters}), macro F1"
            f" {self.macro_f1:.1%}; always the most frequent class: {self.majority:.1%}; chance:"
            f" {self.chance:.1%}"
        )


def cross_validate(
    features: Features,
    labels: Ints,
    *,
    ids: Sequence[str],
    class_names: Sequence[str],
    groups: Sequence[str] | None,
    num_folds: int,
    balanced: bool = False,
) -> CrossValidation:
    """Predict every image by a probe of the other folds. Block, pooling and strength are chosen
    anew each time, by those folds: nothing of the result has seen the image.

    Args:
        features: Of the images.
        labels: [n].
        ids: Of each image.
        class_names: Of the labels.
        groups: Of each image; one group is in one fold. None: each its own.
        num_folds: At most; fewer where a class has fewer images or groups.
        balanced: As of `fit_probe`.

    Raises:
        ValueError: Too few images or groups to leave any out.
    """
    if groups is None:
        folds = assign_folds(labels, num_folds=num_folds)
    else:
        folds = assign_group_folds(labels, groups, num_folds=num_folds)
    if folds.max() < 1 or (folds < 0).any():
        raise ValueError(
            "--folds leaves out every image once, and a class has one image or group alone; add"
            " some, or leave the class out with data.classes"
        )
    logits = np.zeros((len(labels), len(class_names)), dtype=np.float32)
    for fold in range(folds.max() + 1):
        is_out = folds == fold
        # the others' folds serve to choose by
        _, inner_folds = np.unique(folds[~is_out], return_inverse=True)
        if not inner_folds.any():
            # of two folds the other is one alone
            inner_folds = assign_folds(labels[~is_out])
        probe = fit_probe(
            {readout: values[~is_out] for readout, values in features.items()},
            labels[~is_out],
            num_classes=len(class_names),
            balanced=balanced,
            folds=inner_folds,
        )
        logits[is_out] = probe.compute_logits(features[probe.readout][is_out].numpy())

    scores = score_logits(logits, labels)
    clusters = number_groups(groups, len(labels))
    predictions = [
        FoldPrediction(
            path=ids[index],
            group=None if groups is None else groups[index],
            fold=int(folds[index]),
            label=class_names[labels[index]],
            predicted=class_names[scores.predicted[index]],
            probability=float(scores.confidence[index]),
        )
        for index in range(len(labels))
    ]
    return CrossValidation(
        num_folds=int(folds.max()) + 1,
        num_images=len(labels),
        num_groups=None if groups is None else len(set(groups)),
        top1=float(scores.correct.mean()),
        interval=compute_clustered_interval(scores.correct, clusters),
        macro_f1=compute_metrics(scores)["macro_f1"],
        majority=float(np.bincount(labels).max() / len(labels)),
        chance=1 / len(class_names),
        predictions=predictions,
    )


def number_groups(groups: Sequence[str] | None, count: int) -> Ints:
    """A number for the group of each of `count` images; None: each is its own."""
    if groups is None:
        return np.arange(count)
    return np.unique(np.array(groups, dtype=str), return_inverse=True)[1]


def assign_group_folds(labels: Ints, groups: Sequence[str], *, num_folds: int) -> Ints:
    """The fold of each image: whole groups, each class spread as evenly as can be; scikit-learn's
    `StratifiedGroupKFold`. There are fewer folds where a class has fewer groups."""
    # scikit-learn takes a second to import
    from sklearn.model_selection import StratifiedGroupKFold

    clusters = number_groups(groups, len(labels))
    groups_a_class = [len(set(clusters[labels == label])) for label in np.unique(labels)]
    num_folds = min(num_folds, *groups_a_class)
    folds = np.full(len(labels), -1, dtype=np.int64)
    if num_folds < 2:
        return folds
    splitter = StratifiedGroupKFold(num_folds, shuffle=True, random_state=0)
    for fold, (_, out) in enumerate(splitter.split(clusters, labels, clusters)):
        folds[out] = fold
    return folds
