"""Cross-validation of a run: each image is predicted by a model that was trained without its fold."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from torch import nn

from vit.data.dataset import ImageDataset
from vit.evaluation.metrics import score_logits
from vit.evaluation.predictions import CROSS_VALIDATION, PREDICTIONS_FILE, save_predictions
from vit.prediction.batch_predictor import read_dataset
from vit.prediction.probabilities import Float32s, Ints
from vit.runtime.console import echo
from vit.runtime.processes import current_process
from vit.training.folds import assign_folds, name_always_trained
from vit.training.linear_probe import predict_by_other_folds
from vit.training.run import Run
from vit.training.run_directory import FOLDS
from vit.training.signals import TrainingInterrupted
from vit.training.validation import build_predictor

# Keys that `--folds` sets: the run has all images.
FOLDS_KEYS = {"data.validation_fraction": 0, "data.test_fraction": 0}


def divide_images(run: Run, num_folds: int) -> tuple[ImageDataset, Ints]:
    """Return the images of a run, and the fold that leaves out each (`assign_folds`). Raises
    ValueError for a configuration that holds out images, and if every class has too few images or
    groups to leave any out."""
    data = run.data.config.data
    if data.validation_fraction or data.test_fraction:
        raise ValueError(
            f"--folds leaves out each image once; {' and '.join(FOLDS_KEYS)} must be 0"
        )
    if run.probe is not None and run.probe.features:
        images = run.probe.images
    else:
        # Unreadable images are left out here.
        images = run.data.decode(run.data.train)
    folds = assign_folds(images.labels, images.groups, num_folds=num_folds)
    if folds.max() < 1:
        raise ValueError(
            "--folds leaves out images of each class in turn, and every class has one image or"
            " group alone; add some"
        )
    return images, folds


def cross_validate(
    run: Run,
    images: ImageDataset,
    folds: Ints,
    build: Callable[..., Run],
    *,
    module: nn.Module | None,
    directory: Path,
    resume: bool,
) -> str:
    """Predict each image by a model that has seen neither it nor another image of its group, and
    write the predictions, which `vit evaluate` measures, into a run's directory. Returns a sentence
    for the user. `build` is `build_run`, and `module` the model from Python before its training."""
    splits, fitted = run.data.splits, run.probe
    num_folds, num_classes = int(folds.max()) + 1, len(images.class_names)
    is_main = current_process().is_main
    if fitted is not None and fitted.features:
        logits = predict_by_other_folds(
            fitted.features,
            images.labels,
            folds,
            num_classes=num_classes,
            groups=images.groups,
            balanced=run.data.class_balance == "weights",
        )
    else:
        logits = np.zeros((len(images), num_classes), dtype=np.float32)
        # not decoded: each fold has a preprocessing of its own
        source = splits.split("train")
        place_of = {image_id: place for place, image_id in enumerate(source.ids)}
        for fold in range(num_folds):
            ids = [images.ids[index] for index in np.flatnonzero(folds == fold).tolist()]
            part_directory = directory / FOLDS / str(fold + 1)
            if is_main:
                part_directory.mkdir(parents=True, exist_ok=True)
                echo(f"fold {fold + 1} of {num_folds}", err=True)
            part = build(
                run.data.config,
                directory=part_directory,
                splits=replace(splits, written={CROSS_VALIDATION: ids}, num_trained_on=None),
                user_model=copy.deepcopy(module),
            )
            left_out = source.subset([place_of[image_id] for image_id in ids])
            try:
                logits[folds == fold] = _train_and_predict(part, left_out, resume=resume)
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


def _train_and_predict(part: Run, left_out: ImageDataset, *, resume: bool) -> Float32s:
    """Train the run of a fold and predict the images that it doesn't have."""
    if resume:
        part.trainer.resume()
    part.trainer.train()
    images = part.data.decode(left_out)
    step = part.trainer.train_step
    predictor = build_predictor(part.data, step.averaged_model, device=step.device)
    read = partial(read_dataset, images, part.data.preprocess)
    return predictor.predict(read, count=len(images))
