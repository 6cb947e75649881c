"""Parts of a model file by which a model says that it isn't sure, written at the end of the run:
thresholds of prediction sets, a temperature, and features by which unusual images are found."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Float

from vit.bundle import MODEL_FILE, Bundle, build_bundle
from vit.data.dataset import choose_evenly, printable
from vit.evaluation.calibration import MIN_IMAGES, fit_temperature
from vit.model.logits import has_features
from vit.model.model_file import Likeness, write_model_file
from vit.model.vision_transformer import VisionTransformer
from vit.prediction.conformal import COVERAGE, find_threshold
from vit.prediction.features import compute_features, compute_readable_features
from vit.prediction.neighbours import compute_distances, normalize_rows
from vit.runtime.arguments import first_line
from vit.runtime.processes import Process
from vit.training.data import TrainingData
from vit.training.model_writer import read_run_model
from vit.training.run import Run
from vit.training.validation import build_predictor

_MAX_DISTANCES = 5000


def complete_model_file(run: Run, directory: Path, process: Process) -> str | None:
    """Put the thresholds, the temperature and the features into the model file of a run. Its
    weights stay as they are.

    Args:
        run: A run that has ended.
        directory: Directory of the run.
        process: This process. All processes take part, and the main process writes.

    Returns:
        A sentence about the temperature; None if it isn't used.

    Raises:
        ValueError: The model file is not the run's best model.
    """
    path = directory / MODEL_FILE
    train_step = run.trainer.train_step
    step = run.trainer.progress.best_step
    content = read_run_model(directory, run_id=run.trainer.identity.run_id, step=step)
    if content is None:
        raise ValueError(
            f"{path} is missing, damaged or not of step {step}, the best of this run;"
            " write it again with --resume"
        )
    # A copy of the run's own module takes the best weights, so that none is built again.
    module = copy.deepcopy(train_step.module)
    bundle = build_bundle(content, path, model=module, device=train_step.device)
    num_images = 0
    thresholds: dict[str, float] = {}
    calibration: dict[str, object] = {}
    said = None
    if run.trainer.validator is not None:
        held_aside = run.trainer.validator.held_aside
        # Each image at an epoch that it did not choose.
        validation = run.data.decoded_validation
        indices = held_aside.indices
        is_known = len(indices) >= MIN_IMAGES and bool(np.isfinite(held_aside.logits).all())
        if is_known and run.config.train.calibrate:
            temperature = fit_temperature(held_aside.logits, validation.labels[indices])
            fitted_on = {
                "split": validation.split,
                "fingerprint": validation.fingerprint,
                "num_images": len(indices),
            }
            calibration = {"temperature": temperature, "temperature_fitted_on": fitted_on}
            said = (
                f"calibrated: temperature {temperature:.3f}, fitted on {len(indices):,} images"
                f" ({validation.split})"
            )
        num_images = len(held_aside.probabilities)
        # the thresholds of labels decide, so that they need no sets
        if not bundle.is_multilabel:
            threshold = find_threshold(held_aside.probabilities)
            if threshold is not None:
                thresholds[str(COVERAGE)] = threshold

    # A run that has ended must not fail because of them.
    conformal: dict[str, object] = {
        "num_images": num_images,
        "thresholds": thresholds,
        "no_likeness": "",
    }
    likeness = None
    try:
        likeness, training_images = compute_likeness(
            run.data,
            bundle,
            max_training_features=run.config.train.max_training_features,
            probed_features=_find_probed_features(run, bundle),
        )
        conformal["num_training_features"] = len(likeness.training_features)
        conformal["num_distances"] = len(likeness.distances)
        conformal["training_images"] = training_images
    except (OSError, ValueError, RuntimeError) as error:
        conformal["no_likeness"] = first_line(error)
    if process.is_main:
        values: dict[str, object] = {"conformal": conformal}
        best = run.trainer.progress.best
        if run.trainer.validator is not None and not bundle.is_multilabel:
            count = len(run.data.decoded_validation)
            values["validation"] = {"top1": best.top1, "num_images": count}
        metadata = {**content.metadata, **values, **calibration}
        likeness = likeness or content.likeness
        write_model_file(path, replace(content, metadata=metadata, likeness=likeness))
    process.wait()
    return said


def _find_probed_features(run: Run, bundle: Bundle) -> Float[np.ndarray, "n D"] | None:
    """Return the features of all training images that the probe was fitted on, if the model is the
    probe. In a resumed run they are computed again, to the same bits."""
    model = bundle.model
    is_probe = run.trainer.progress.best_step == 0 and run.config.model.probe is True
    if not (is_probe and isinstance(model, VisionTransformer)) or run.data.train.pixels is None:
        return None
    if run.probe is not None:
        return run.probe.features
    predictor = build_predictor(run.data, model, device=run.trainer.train_step.device)
    features = compute_features(predictor, run.data.train, cache_dir=run.data.splits.cache_dir)
    return features[len(model.blocks), model.global_pool].numpy()


def compute_likeness(
    data: TrainingData,
    bundle: Bundle,
    *,
    max_training_features: int,
    probed_features: Float[np.ndarray, "n D"] | None = None,
) -> tuple[Likeness, list[tuple[str, int]]]:
    """Compute the features by which unusual images and the nearest training images are found.

    Args:
        data: Training and validation images.
        bundle: The model.
        max_training_features: Training images at most; each class has the share that it has in
            training. 2,000 take 0.8 MB in the model file at 192 channels, 3 MB at 768. 0: none.
        probed_features: Features of all training images, if the model is a probe that was fitted on
            them. None: they are computed.

    Returns:
        The features, with the name and the class of each training image.

    Raises:
        ValueError: There are none; the message is the reason.
    """
    if not max_training_features:
        raise ValueError("train.max_training_features is 0")
    if data.validation is None:
        raise ValueError("there are no validation images")
    if not has_features(bundle.model):
        raise ValueError(f"a {type(bundle.model).__name__} gives no features")
    if data.train.reader.is_remote and data.train.pixels is None:
        raise ValueError("the training images are in object storage")

    # Evenly spaced among the images by class, so that each class has its share.
    by_class = np.argsort(data.train.strata, kind="stable")
    chosen = by_class[choose_evenly(len(by_class), max_training_features)]
    chosen.sort()
    training = data.train.subset(chosen)
    if probed_features is None:
        training_features, readable = compute_readable_features(bundle, training)
    else:
        training_features, readable = probed_features[chosen], np.arange(len(chosen))
    validation = data.decoded_validation
    held_out = choose_evenly(len(validation), _MAX_DISTANCES)
    features, _ = compute_readable_features(bundle, validation.subset(held_out))
    if not len(training_features):
        raise ValueError("the training images can't be read again")
    units = normalize_rows(training_features).astype(np.float16)
    likeness = Likeness(units, compute_distances(features, units).astype(np.float32))
    names = [printable(training.ids[index]) for index in readable]
    if training.is_multilabel:
        # an image has no class of its own
        return likeness, [(name, -1) for name in names]
    return likeness, list(zip(names, training.labels[readable].tolist(), strict=True))
