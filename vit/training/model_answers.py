"""Parts of a model file by which a model says that it isn't sure, written at the end of the run:
thresholds of prediction sets, a temperature, and features by which unusual images are found."""

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vit.bundle import Bundle, load_bundle
from vit.data.dataset import choose_evenly
from vit.evaluation.calibration import MIN_IMAGES, fit_temperature
from vit.evaluation.metrics import score_logits
from vit.model.find_file import MODEL_FILE
from vit.model.model_file import Likeness, read_model_file, write_model_file
from vit.prediction.batch_predictor import predict_dataset
from vit.prediction.conformal import COVERAGE, find_threshold
from vit.prediction.neighbours import compute_distances, normalize_rows
from vit.prediction.probabilities import Float32s
from vit.runtime.arguments import first_line
from vit.training.run import Run

# training images whose features are kept
_MAX_TRAINING_FEATURES = 2000
_MAX_DISTANCES = 5000


def complete_model_file(run: Run, directory: Path) -> None:
    """Put the thresholds, the temperature and the features into the model file of a run that has
    ended. Its weights stay as they are. All processes take part, and the main process writes."""
    path = directory / MODEL_FILE
    trainer = run.trainer
    content = read_model_file(path)
    # A copy of the run's own module takes the best weights, so that none is built again.
    module = copy.deepcopy(trainer.train_step.module)
    bundle = load_bundle(path, model=module, device=trainer.train_step.device)
    validation = run.data.validation
    thresholds: dict[str, float] = {}
    metadata: dict[str, Any] = {**content.metadata, "conformal": {"thresholds": thresholds}}
    likeness = content.likeness
    if validation is not None:
        logits, features = predict_dataset(bundle, validation)
        if len(logits) >= MIN_IMAGES and np.isfinite(logits).all():
            metadata["temperature"] = fit_temperature(logits, validation.labels)
        # The thresholds of labels decide, so that they need no sets.
        if not validation.is_multilabel:
            threshold = find_threshold(score_logits(logits, validation.labels).label_probability)
            if threshold is not None:
                thresholds[str(COVERAGE)] = threshold
        # A run that has ended must not fail because of images that can't be read any more.
        if features.size:
            try:
                likeness = _compute_likeness(run, bundle, features)
            except (OSError, ValueError, RuntimeError) as error:
                warnings.warn(f"unusual images won't be told: {first_line(error)}", stacklevel=2)
    if trainer.process.is_main:
        write_model_file(path, replace(content, metadata=metadata, likeness=likeness))
    trainer.process.wait()


def _compute_likeness(run: Run, bundle: Bundle, held_out: Float32s) -> Likeness:
    """Compute the features by which unusual images are found."""
    fitted = run.probe if run.trainer.progress.best_step == 0 else None
    images = fitted.images if fitted else run.data.train
    # Evenly spaced among the images by class, so that each class has its share.
    by_class = np.argsort(images.strata, kind="stable")
    chosen = np.sort(by_class[choose_evenly(len(by_class), _MAX_TRAINING_FEATURES)])
    if fitted:
        training_features = fitted.features[fitted.probe.readout].numpy()[chosen]
    else:
        # Images that are decoded while training are decoded here.
        _, training_features = predict_dataset(bundle, run.data.decode(images.subset(chosen)))
    held_out = held_out[choose_evenly(len(held_out), _MAX_DISTANCES)]
    units = normalize_rows(training_features).astype(np.float16)
    return Likeness(units, compute_distances(held_out, units).astype(np.float32))
