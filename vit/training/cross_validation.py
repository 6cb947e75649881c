"""Cross-validation on features: each image is predicted by a probe that has seen neither the image
nor another image of its group."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vit.config import Config
from vit.data.dataset import ImageDataset, printable
from vit.evaluation.clusters import (
    Interval,
    compute_clustered_interval,
    number_clusters,
    select_groups,
)
from vit.evaluation.metrics import compare_precision, compute_metrics, score_logits
from vit.evaluation.out_of_fold import OutOfFold
from vit.prediction.features import Features, compute_features
from vit.prediction.probabilities import Bools, Float32s, Ints
from vit.runtime.files import write_json
from vit.runtime.numbers import format_interval, format_percent
from vit.runtime.processes import current_process
from vit.training.folds import (
    assign_folds,
    describe_always_trained,
    list_always_trained,
    train_on_whole_classes,
)
from vit.training.linear_probe import Balance, fit_probe
from vit.training.probe import is_probe_alone
from vit.training.resolve import FOLDS_OVERRIDES
from vit.training.run import Run
from vit.training.run_directory import CROSS_VALIDATION_FILE
from vit.training.validation import build_predictor


@dataclass(frozen=True)
class FoldPrediction:
    """The out-of-fold prediction of one image.

    Attributes:
        label, predicted: The class; or the names of the labels, where images may have several.
        probability: Probability of the predicted class, 0 to 1, or of each label of the model.
    """

    path: str
    group: str | None
    fold: int
    label: str | list[str]
    predicted: str | list[str]
    probability: float | list[float]


@dataclass(frozen=True, kw_only=True)
class CrossValidation:
    """The out-of-fold predictions of all images and their accuracy. Accuracies are from 0 to 1.

    Attributes:
        top1: None where images have several labels. Then `interval` is that of `map`, and `chance`
            the mean frequency of the labels, the precision of a random order.
        map: Mean average precision of the labels; None for classes.
        num_images: Images that were left out once.
        num_groups: Groups of these images; None where each image is its own group.
        interval: 95 % interval of the accuracy, clustered by group.
        always_trained: Classes of which no image was left out. See `assign_folds`.
        measured: Places of the images that were left out, among all, [num_images].
        logits: Their logits, [num_images, C].
    """

    num_folds: int
    num_images: int
    num_groups: int | None
    top1: float | None = None
    map: float | None = None
    interval: Interval
    macro_f1: float
    majority: float | None = None
    chance: float
    predictions: list[FoldPrediction]
    always_trained: list[str]
    measured: Ints = field(repr=False)
    logits: Float32s = field(repr=False)

    def save(self, directory: Path, images: ImageDataset) -> None:
        """Write cross_validation.json into a run's directory, and the logits, from which `vit
        evaluate` measures the images as a test split.

        Args:
            directory: The directory.
            images: The decoded training images.
        """
        out_of_fold = OutOfFold(
            ids=tuple(row.path for row in self.predictions),
            digests=images.digests[self.measured],
            folds=np.array([row.fold for row in self.predictions]),
            logits=self.logits,
        )
        out_of_fold.save(directory)
        values = asdict(self)
        del values["measured"], values["logits"]
        write_json(directory / CROSS_VALIDATION_FILE, values)

    def describe(self) -> str:
        """The result in a sentence."""
        percent = partial(format_percent, count=self.num_images)
        confidence = "with 95 % confidence"
        if self.num_groups is not None:
            confidence += f", by {self.num_groups:,} groups"
        measure, value = ("top-1", self.top1)
        if self.map is not None:
            measure, value = ("mean average precision", self.map)
        assert value is not None
        guess = ""
        if self.majority is not None:
            guess = f"; always the most frequent class: {percent(self.majority)}"
        return (
            f"{self.num_folds}-fold cross-validation of {self.num_images:,} images: {measure}"
            f" {percent(value)} ({format_interval(self.interval, self.num_images)} {confidence}),"
            f" macro F1 {percent(self.macro_f1)}{guess}; chance: {percent(self.chance)}"
            f"{describe_always_trained(self.always_trained)}"
        )


def check_folds(config: Config) -> None:
    """Raise ValueError for a configuration that can't be cross-validated."""
    if not is_probe_alone(config) or config.data.validation_fraction or config.data.test_fraction:
        raise ValueError(
            "--folds cross-validates a linear probe of all images: it needs --init WEIGHTS, and"
            f" {', '.join(FOLDS_OVERRIDES)} as it sets them"
        )


def cross_validate_run(run: Run, *, num_folds: int, directory: Path) -> CrossValidation:
    """Cross-validate the probe of a run on its training images, and write the result into its
    directory. Their features are in the cache."""
    assert run.uncut_model is not None, "there is one where nothing follows the probe"
    images = run.data.decode(run.data.train)
    predictor = build_predictor(run.data, run.uncut_model, device=run.trainer.train_step.device)
    result = cross_validate(
        compute_features(predictor, images, cache_dir=run.data.splits.cache_dir),
        images.labels,
        ids=[printable(image_id) for image_id in images.ids],
        class_names=images.class_names,
        groups=images.groups,
        num_folds=num_folds,
        balanced=run.data.class_balance == "weights",
    )
    if current_process().is_main:
        result.save(directory, images)
    return result


def cross_validate(
    features: Features,
    labels: NDArray[Any],
    *,
    ids: Sequence[str],
    class_names: Sequence[str],
    groups: Sequence[str] | None,
    num_folds: int,
    balanced: Balance = False,
) -> CrossValidation:
    """Predict each image by a probe of the other folds. These choose the block, the pooling and the
    strength anew each time, so that nothing of the result has seen the image.

    Args:
        features: Features of the images, at each readout.
        labels: [n], or which labels each image has, [n, C].
        ids: Name of each image.
        class_names: Name of each label.
        groups: Group of each image. See `assign_folds`.
        num_folds: Folds at most. See `assign_folds`.
        balanced: See `fit_probe`.

    Raises:
        ValueError: Every class has too few images or groups to leave any out.
    """
    folds = assign_folds(labels, groups, num_folds=num_folds)
    if folds.max() < 1:
        raise ValueError(
            "--folds leaves out images of each class in turn, and every class has one image or"
            " group alone; add some"
        )
    logits = np.zeros((len(labels), len(class_names)), dtype=np.float32)
    for fold in range(folds.max() + 1):
        is_out = folds == fold
        inner_groups = select_groups(groups, ~is_out)
        # The folds of the other images serve to choose by.
        inner_folds = folds[~is_out]
        inner_folds = train_on_whole_classes(inner_folds - (inner_folds > fold), labels[~is_out])
        if inner_folds.max() < 1:
            # Only one of two folds is left.
            inner_folds = assign_folds(labels[~is_out], inner_groups)
        probe = fit_probe(
            {readout: values[~is_out] for readout, values in features.items()},
            labels[~is_out],
            num_classes=len(class_names),
            balanced=balanced,
            folds=inner_folds,
            groups=inner_groups,
        )
        logits[is_out] = probe.compute_logits(features[probe.readout][is_out].numpy())

    measured = np.flatnonzero(folds >= 0)
    clusters = number_clusters(groups, len(labels))[measured]
    measure = _measure_labels if labels.ndim == 2 else _measure_classes
    accuracy, answers = measure(logits[measured], labels[measured], clusters, class_names)
    predictions = [
        FoldPrediction(ids[index], groups[index] if groups else None, int(folds[index]), *answer)
        for index, answer in zip(measured.tolist(), answers, strict=True)
    ]
    return CrossValidation(
        **accuracy,
        num_folds=int(folds.max()) + 1,
        num_images=len(measured),
        num_groups=None if groups is None else len(set(clusters.tolist())),
        predictions=predictions,
        always_trained=[class_names[label] for label in list_always_trained(folds, labels)],
        measured=measured,
        logits=logits[measured],
    )


def _measure_classes(
    logits: Float32s, labels: Ints, clusters: Ints, class_names: Sequence[str]
) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """Return the accuracy, by the fields of `CrossValidation`; and label, predicted and probability
    of each image, as `FoldPrediction` has them."""
    scores = score_logits(logits, labels)
    answers = [
        (class_names[label], class_names[predicted], probability)
        for label, predicted, probability in zip(
            labels.tolist(), scores.predicted.tolist(), scores.confidence.tolist(), strict=True
        )
    ]
    accuracy = {
        "top1": float(scores.correct.mean()),
        "interval": compute_clustered_interval(scores.correct, clusters),
        "macro_f1": compute_metrics(scores)["macro_f1"],
        "majority": float(np.bincount(labels).max() / len(labels)),
        "chance": 1 / len(class_names),
    }
    return accuracy, answers


def _measure_labels(
    logits: Float32s, labels: Bools, clusters: Ints, class_names: Sequence[str]
) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """Measure several labels an image. See `_measure_classes`."""
    scores = score_logits(logits, labels)
    answers = [
        (list(compress(class_names, has)), list(compress(class_names, predicted)), probabilities)
        for has, predicted, probabilities in zip(
            labels, scores.predicted, scores.probabilities.tolist(), strict=True
        )
    ]
    (mean,), (interval,), _ = compare_precision([scores], list(map(str, clusters)))
    accuracy = {
        "map": float(mean),
        "interval": interval,
        "macro_f1": compute_metrics(scores)["macro_f1"],
        "chance": float(labels.mean(axis=0)[labels.any(axis=0)].mean()),
    }
    return accuracy, answers
