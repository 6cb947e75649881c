"""Cross-validation on features: each image is predicted by a probe that has seen neither the image
nor another image of its group. `vit evaluate` measures the predictions."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vit.config import Config
from vit.evaluation.metrics import score_logits
from vit.evaluation.predictions import save_predictions
from vit.prediction.features import Features
from vit.prediction.probabilities import Float32s, Ints
from vit.runtime.metrics_file import PREDICTIONS_FILE
from vit.training.folds import Labels, assign_folds, name_always_trained, train_on_whole_classes
from vit.training.linear_probe import fit_probe
from vit.training.probe import is_probe_alone
from vit.training.run import Run

# Keys that `--folds` sets: a linear probe is fitted on all images.
FOLDS_KEYS = {
    "data.validation_fraction": 0,
    "data.test_fraction": 0,
    "model.probe": True,
    "model.freeze": "backbone",
}


def check_folds(config: Config) -> None:
    """Raise ValueError for a configuration that can't be cross-validated."""
    if not is_probe_alone(config) or config.data.validation_fraction or config.data.test_fraction:
        raise ValueError(
            "--folds cross-validates a linear probe of all images: it needs --init WEIGHTS, and"
            f" {', '.join(FOLDS_KEYS)} as it sets them"
        )


def cross_validate_run(run: Run, *, num_folds: int, directory: Path) -> str:
    """Cross-validate the probe of a run on its training images, and write the predictions into its
    directory. All processes call it. Returns a sentence for the user."""
    images = run.data.decode(run.data.train)
    features = run.compute_probe_features()
    said = ""
    if run.trainer.process.is_main:
        folds, logits = predict_by_other_folds(
            features,
            images.labels,
            num_classes=len(images.class_names),
            groups=images.groups,
            num_folds=num_folds,
            balanced=run.data.class_balance == "weights",
        )
        measured = np.flatnonzero(folds >= 0)
        left_out = logits[measured]
        scores = score_logits(left_out, images.labels[measured])
        save_predictions(directory / PREDICTIONS_FILE, images.subset(measured), scores, left_out)
        said = (
            f"{folds.max() + 1}-fold cross-validation of {len(measured):,} images"
            f"{name_always_trained(folds, images.labels, images.class_names)}"
            f"; vit evaluate {directory} reports on them"
        )
    return run.trainer.process.broadcast(said)


def predict_by_other_folds(
    features: Features,
    labels: Labels,
    *,
    num_classes: int,
    groups: Sequence[str] | None,
    num_folds: int,
    balanced: bool = False,
) -> tuple[Ints, Float32s]:
    """Predict each image by a probe of the other folds. These choose the block, the pooling and the
    strength anew each time, so that nothing of the result has seen the image.

    Returns:
        The fold that left out each image, or −1; and the logits [n, C], 0 where it is −1.

    Raises:
        ValueError: Every class has too few images or groups to leave any out.
    """
    folds = assign_folds(labels, groups, num_folds=num_folds)
    if folds.max() < 1:
        raise ValueError(
            "--folds leaves out images of each class in turn, and every class has one image or"
            " group alone; add some"
        )
    logits = np.zeros((len(labels), num_classes), dtype=np.float32)
    for fold in range(folds.max() + 1):
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
        logits[is_out] = probe.compute_logits(features[probe.readout][is_out].numpy())
    return folds, logits
