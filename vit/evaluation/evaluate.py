"""Metrics of a model on labelled images: `vit.evaluate`."""

import datetime
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vit.bundle import Bundle, Models, keeps_mode, open_model, require_classifier
from vit.data.dataset import ImageRule, printable
from vit.data.splits import DatasetSplits
from vit.evaluation.images import EvaluationSet, check_data, find_overlap, load_images, open_data
from vit.evaluation.metrics import Scores, find_known, measure, score_logits
from vit.evaluation.predictions import CROSS_VALIDATION, Predictions, load_predictions
from vit.evaluation.result import EVALUATION_FILE, Evaluation, EvaluationResult
from vit.evaluation.subgroups import measure_subgroups, read_values, tells_class
from vit.evaluation.thresholds import choose_operating_point, parse_rule
from vit.prediction.batch_predictor import BatchPredictor
from vit.prediction.decision import describe_decision, read_thresholds
from vit.prediction.probabilities import Float32s
from vit.runtime.arguments import check_minimum, shorten
from vit.runtime.device import describe_device
from vit.runtime.processes import current_process, join_processes
from vit.runtime.progress import show_progress
from vit.runtime.version import collect_versions


@keeps_mode
def evaluate(
    model: Models,
    *,
    data: str | Path | None = None,
    root: str | Path | None = None,
    split: str | None = None,
    dataset: Any = None,
    class_names: Sequence[str] | None = None,
    group_by: str | int | None = None,
    label_by: str | None = None,
    path_column: str | None = None,
    label_column: str | None = None,
    split_column: str | None = None,
    group_column: str | None = None,
    by: str | Sequence[str] = (),
    operating_point: str | None = None,
    ordered: bool = False,
    num_examples: int = 16,
    batch_size: int | None = None,
    device: str = "auto",
    precision: str = "auto",
) -> EvaluationResult:
    """Measure a model on images that were held out of its training.

    Args:
        model: A run, a model file, timm:NAME, a folder of timm or Hugging
            Face, a file of weights (.pth, .ckpt), or imagenette (a small model
            that comes with the package). From Python also a bundle or a
            module of timm, torchvision or Hugging Face. The probabilities of
            several models with equal classes and preprocessing are averaged.
        data: A data set's name, a folder, a table or shards. None: the
            model's own.
        root: Folder of the data set that `data` names. None: its usual place.
        split: Split to measure on: train, validation, test or all. None: for
            a run of vit train --folds each image by a model that hasn't seen
            it, else test, all without splits, or validation for images that
            were passed to `vit.train`.
        dataset: Images instead of `data`, as `vit.train` takes them. They
            are the split "test", or those of a dictionary.
        class_names: Name of each class, of a module or weights without names.
            None: the model's own, or "class 0" and so on.
        group_by: See `vit.train`.
        label_by: See `vit.train`.
        path_column: See `vit.train`.
        label_column: See `vit.train`.
        split_column: See `vit.train`.
        group_column: See `vit.train`.
        by: Columns of the images' table, such as site,camera: accuracy, or
            mean average precision, for each of at most 100 values, with
            intervals, the worst first.
        operating_point: Choose the probability from which a label is
            predicted, or one class against the rest, on the validation split
            or the predictions of `vit train --folds`: sensitivity=0.95,
            specificity=0.9 and precision=0.8 hold on average over new images,
            f1 is the best on these. LABEL:RULE names the label. None: the
            model file's, otherwise 0.5 for a label and the most probable
            class. `.save` writes the model file with it.
        ordered: The classes are grades, in the model's order: measure the
            quadratic weighted kappa, too, as for three to nine whole numbers.
        num_examples: Errors that the report shows, each with its map.
        batch_size: Images at a time. None: 64 on a CPU, 256 on a GPU.
        device: Device: auto, cpu, cuda, cuda:N or mps. A module stays where it
            is with "auto"; otherwise "auto" is a GPU if there is one.
        precision: Number format: auto, float32, bfloat16 or float16. "auto"
            is the fastest one that the device computes with.

    Returns:
        The result: `.evaluation.metrics` has the metrics by name, from 0 to 1,
        and `.evaluation.intervals` their 95 % intervals. `.save(directory)`
        writes what `vit evaluate` writes.

    Raises:
        ValueError: The data is unknown, it has classes that the model doesn't
            know, or the images allow no such operating point.

    Example:
        >>> result = vit.evaluate("runs/digits")
        >>> result.evaluation.metrics["top1"]
        >>> result.evaluation.intervals["top1"]
    """
    check_minimum(0, num_examples=num_examples)
    check_minimum(1, batch_size=batch_size)
    image_rule = ImageRule(
        label_by=label_by,
        path_column=path_column,
        label_column=label_column,
        split_column=split_column,
        group_column=group_column,
        group_by=group_by,
    )
    check_data(data, dataset, image_rule)
    # in a process group all processes share the images
    with join_processes(device) as (_, device_name):
        bundle = open_model(model, device=device_name, class_names=class_names)
        require_classifier(bundle)
        rule = None
        if operating_point is not None:
            rule = parse_rule(operating_point, bundle)
        if ordered and bundle.is_multilabel:
            raise ValueError("--ordered is for a model of one class an image")
        splits = open_data(bundle, data, root, dataset, rule=image_rule).join_copies()
        # the probes of the folds have not seen the images that they predict
        found = None
        if data is None and dataset is None and split is None:
            found = _load_out_of_fold(bundle)
        if found is not None:
            split = "train"
        elif rule is not None and (split or splits.default_split) in ("validation", "all"):
            raise ValueError(
                "--operating-point is chosen on the validation images, which can't measure it, too;"
                " add --split test"
            )
        source = splits.split(split)
        columns = [by] if isinstance(by, str) else by
        values = {column: read_values(source, column) for column in columns}
        # All images are decoded before anything is computed: errors in them are reported first.
        images = load_images(bundle, splits, split)
        # one predictor for all passes: the batch size changes the last bits of logits
        predictor = BatchPredictor.from_bundle(bundle, batch_size=batch_size, precision=precision)
        notes = list(images.dataset.notes)
        if ordered:
            notes.append(f"grades, the lowest first: {shorten(', '.join(bundle.class_names))}")
        logits = None
        if found is not None:
            notes.append(
                "each image is predicted by a model that has seen neither it nor its group;"
                " the model itself is trained on all images; intervals may be a little too narrow,"
                " because the models share training images (Bates, Hastie & Tibshirani 2021)"
            )
            images, logits = _select(images, found), found.logits
        # the operating point changes what is predicted, but no logits
        fitted = bundle
        if rule is not None:
            deciding, found_logits = images, logits
            if found_logits is None:
                deciding = load_images(bundle, splits, "validation")
                found_logits = _predict(predictor, deciding, title="deciding")
            fitted, said = choose_operating_point(bundle, rule, deciding, found_logits)
            notes += said
        notes += _describe_images(fitted, images)
        if logits is None:
            logits = _predict(predictor, images, title="evaluating")
        scores, evaluation = _measure(
            fitted,
            images,
            logits,
            values,
            is_ordered=ordered,
            splits=splits,
            notes=notes,
            conditions=_describe_conditions(predictor),
        )
        return EvaluationResult(
            evaluation,
            scores,
            logits,
            images,
            fitted,
            num_examples=num_examples,
            is_main=current_process().is_main,
            has_new_point=rule is not None,
        )


def _load_out_of_fold(bundle: Bundle) -> Predictions | None:
    """Return the predictions beside a model file; None if its run wasn't cross-validated."""
    run = Path(bundle.name)
    if run.is_file():
        run = run.parent
    # an evaluation's are of its own images, beside the model with its operating point
    if (run / EVALUATION_FILE).is_file():
        return None
    return load_predictions(run, len(bundle.class_names))


def _select(images: EvaluationSet, found: Predictions) -> EvaluationSet:
    """Return the predicted ones of the training images, in the order of the predictions. Raises
    ValueError if one is missing or has changed."""
    ids = found.ids.tolist()
    place_of = dict(zip(images.ids, range(len(images)), strict=True))
    chosen = np.array([place_of.get(name, -1) for name in ids])
    if (chosen < 0).any() or (images.dataset.digests[chosen] != found.digests).any():
        raise ValueError(
            "the images have changed since the run was cross-validated; train it again, or name"
            " other images with --data"
        )
    dataset = replace(images.dataset.subset(chosen), split=CROSS_VALIDATION)
    return replace(images, dataset=dataset, ids=tuple(ids), labels=images.labels[chosen])


def _describe_images(bundle: Bundle, images: EvaluationSet) -> list[str]:
    """Return what a reader should know about the images and the decision, in sentences."""
    notes = []
    validation = bundle.data.get("splits", {}).get("validation", {})
    if images.dataset.fingerprint == validation.get("fingerprint"):
        notes.append(
            "training chose the model by these images, so its accuracy on them is too high: quote"
            " its accuracy on other images"
        )
    if images.num_groups < len(images):
        notes.append(
            f"these {len(images):,} images are of {images.num_groups:,} groups, such as copies;"
            " intervals allow for that"
        )
    return [*notes, *filter(None, [describe_decision(bundle)])]


def _measure(
    bundle: Bundle,
    images: EvaluationSet,
    logits: Float32s,
    values: Mapping[str, Mapping[str, str]],
    *,
    is_ordered: bool,
    splits: DatasetSplits,
    notes: list[str],
    conditions: dict[str, str],
) -> tuple[Scores, Evaluation]:
    """Measure logits, of all images and by columns, see `read_values`."""
    dataset = images.dataset
    scores = score_logits(
        logits,
        images.labels,
        temperature=bundle.temperature,
        thresholds=read_thresholds(bundle),
    )
    measured = measure(scores, dataset.groups, bundle.class_names, is_ordered=is_ordered)
    subgroups = {}
    for column, known in values.items():
        texts = [known[name] for name in dataset.ids]
        subgroups[column] = measure_subgroups(texts, scores, dataset.groups)
        if tells_class(texts, images):
            notes.append(
                f"each {column} has one class: accuracy by {column} can't show whether the model looks"
                f" at the {column} instead"
            )
    overlap = None
    # a cross-validated model has seen all of them, and those that predict them have not
    if dataset.split != CROSS_VALIDATION:
        seen = splits.training_groups
        overlap = find_overlap(bundle, images, training_groups=seen, is_correct=scores.correct)
    evaluation = Evaluation(
        task=bundle.data.get("task", "classes"),
        metrics={name: find_known(value) for name, value in measured.metrics.items()},
        intervals=measured.intervals,
        per_class=measured.per_class,
        temperature=bundle.temperature,
        operating_point=bundle.operating_point.get("rule"),
        subgroups=subgroups,
        num_images=len(images),
        num_groups=images.num_groups,
        unreadable=[(printable(name), printable(reason)) for name, reason in dataset.unreadable],
        duplicates_of_training=overlap,
        split=dataset.split,
        fingerprint=dataset.fingerprint,
        model=bundle.name,
        model_sha256=bundle.sha256,
        run_id=bundle.metadata.get("run_id"),
        data=printable(splits.title),
        notes=notes,
        conditions=conditions,
    )
    return scores, evaluation


def _predict(predictor: BatchPredictor, images: EvaluationSet, *, title: str) -> Float32s:
    with show_progress(title, len(images), shown=current_process().is_main) as advance:
        return predictor.predict(images.read, count=len(images), on_progress=advance)


def _describe_conditions(predictor: BatchPredictor) -> dict[str, str]:
    return {
        "device": describe_device(predictor.device),
        "processes": str(current_process().world_size),
        "precision": predictor.precision,
        "batch size": str(predictor.batch_size),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **collect_versions(),
    }
