"""Cross-validation of a run: each image is predicted by a model that was trained without its fold."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import nn

from vit.evaluation.metrics import score_logits
from vit.evaluation.predictions import PREDICTIONS_FILE, save_predictions
from vit.prediction.probabilities import Float32s
from vit.runtime.console import echo
from vit.runtime.processes import current_process
from vit.training.folds import assign_folds, name_always_trained
from vit.training.linear_probe import predict_left_out
from vit.training.probe import is_probe_alone
from vit.training.run import Run
from vit.training.run_directory import FOLDS
from vit.training.signals import TrainingInterrupted
from vit.training.validation import predict_validation

# Keys that `--folds` sets: the run itself has all images.
FOLDS_KEYS = {"data.validation_fraction": 0, "data.test_fraction": 0}


def cross_validate(
    run: Run,
    build: Callable[..., Run],
    *,
    module: nn.Module | None,
    num_folds: int,
    directory: Path,
    resume: bool,
) -> str:
    """Predict each image by a model that has seen neither it nor another image of its group, and
    write the predictions, which `vit evaluate` measures, into a run's directory. Returns a sentence
    for the user. `build` is `build_run` with the run's device and objects, and `module` its model
    from Python before any training. Raises ValueError if no class has images to leave out.
    """
    data = run.data
    probe = run.probe if is_probe_alone(data.config) else None
    is_main = current_process().is_main
    # Unreadable images are left out.
    images = probe.images if probe else data.decode(data.train)
    folds = assign_folds(images.labels, images.groups, num_folds=num_folds)
    num_folds = int(folds.max()) + 1
    if num_folds < 2:
        raise ValueError(
            "--folds leaves out images of each class in turn, and every class has one image or"
            " group alone; add some"
        )

    def train_without(fold: int) -> Float32s:
        splits = replace(
            data.splits,
            # not decoded, because the range of their values is that of the training images
            images=replace(images, pixels=None),
            marks=np.where(folds == fold, "validation", "train"),
            rule=replace(data.splits.rule, test_fraction=0.0, group_duplicates=False),
        )
        part_directory = directory / FOLDS / str(fold + 1)
        part_directory.mkdir(parents=True, exist_ok=True)
        part = build(
            # any fraction: the images are marked
            data.config.with_data(validation_fraction=0.1),
            directory=part_directory,
            splits=splits,
            user_model=copy.deepcopy(module),
        )
        if resume:
            part.trainer.resume()
        part.trainer.train()
        # The last model, because the best one was chosen by these images.
        step = part.trainer.train_step
        return predict_validation(part.data, step.averaged_model, step.device)

    logits = np.zeros((len(images), len(images.class_names)), dtype=np.float32)
    for fold in range(num_folds):
        if probe:
            logits[folds == fold] = predict_left_out(
                probe.features,
                images.labels,
                folds,
                fold,
                num_classes=logits.shape[1],
                groups=images.groups,
                balanced=data.class_balance == "weights",
            )
            continue
        if is_main:
            echo(f"fold {fold + 1} of {num_folds}", err=True)
        try:
            logits[folds == fold] = train_without(fold)
        except TrainingInterrupted as stopped:
            raise TrainingInterrupted(
                f"stopped in fold {fold + 1}; continue with --resume --output {directory}"
            ) from stopped
    measured = np.flatnonzero(folds >= 0)
    answers = logits[measured]
    scores = score_logits(answers, images.labels[measured])
    if is_main:
        save_predictions(directory / PREDICTIONS_FILE, images.subset(measured), scores, answers)
    return (
        f"{num_folds}-fold cross-validation of {len(measured):,} images"
        f"{name_always_trained(folds, images.labels, images.class_names)}"
        f"; vit evaluate {directory} reports on them"
    )
