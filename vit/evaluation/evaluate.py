"""Metrics of a model on labelled images: `vit.evaluate`."""

import datetime
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vit.bundle import Bundle, Models, collect_versions, keeps_mode, open_model, require_classifier
from vit.data.dataset import LabelRule, printable
from vit.data.splits import DatasetSplits
from vit.evaluation.calibration import find_model_file, was_used_for_epoch
from vit.evaluation.images import EvaluationSet, check_data, find_overlap, load_images, open_data
from vit.evaluation.metrics import Scores, bin_confidence, find_known, measure, score_logits
from vit.evaluation.out_of_fold import CROSS_VALIDATION, load_out_of_fold
from vit.evaluation.result import Cost, Evaluation, EvaluationResult
from vit.evaluation.subgroups import build_tables, read_values
from vit.evaluation.thresholds import Rule, choose_operating_point, parse_rule
from vit.model.averaged_model import AveragedModel
from vit.model.logits import compute_logits
from vit.model.model_file import OperatingPoint
from vit.prediction.conformal import measure_sets
from vit.prediction.decision import describe_decision, read_class_threshold, read_thresholds
from vit.prediction.predictor import BatchPredictor
from vit.prediction.probabilities import Float32s
from vit.runtime.arguments import check_arguments
from vit.runtime.device import Precision, autocast, describe_device
from vit.runtime.processes import current_process, join_processes
from vit.runtime.progress import show_progress


@keeps_mode
@check_arguments(num_examples=(0, None), batch_size=(1, None))
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
            several models are averaged, if they have the same classes and
            preprocessing.
        data: A data set's name, a folder, a table or shards. None: the
            model's own.
        root: Folder of the data set that `data` names. None: its usual place.
        split: Split to measure on: train, validation, test, all, or
            cross-validation: each image by a probe of vit train --folds that
            hasn't seen it. None: the latter, else test, or all without
            splits. For images that were passed to `vit.train`, the default is
            the validation split.
        dataset: Images instead of `data`, as `vit.train` takes them. They
            are the split "test", or of a pair "validation".
        class_names: Name of each class of a module, or of weights without
            names. None: the model's own, or "class 0" and so on.
        group_by: See `vit.train`.
        label_by: See `vit.train`.
        path_column: See `vit.train`.
        label_column: See `vit.train`.
        split_column: See `vit.train`.
        group_column: See `vit.train`.
        by: Columns of the images' table, such as site,camera: accuracy, or
            mean average precision, for each of at most 100 values, with
            intervals, the worst first. folder is the folder of an image, group
            its group.
        operating_point: Choose the probability from which a label is
            predicted, or one class against the rest, on the validation split
            or the predictions of `vit train --folds`: sensitivity=0.95,
            specificity=0.9 and precision=0.8 hold on average over new images,
            f1 is the best on these. LABEL:RULE names the label. None: the
            model file's, otherwise 0.5 for a label and the most probable
            class. `.save` writes the model file with it.
        num_examples: Errors that the report shows, each with its map.
        batch_size: Images at a time. None: 64 on a CPU, 256 on a GPU.
        device: Device: auto, cpu, cuda, cuda:N or mps. A module stays where it
            is with "auto"; otherwise "auto" is a GPU if there is one.
        precision: Number format: auto, float32, bfloat16 or float16. "auto"
            is bfloat16 if the device computes with it, float16 on GPUs that
            have tensor cores for that only, and float32 otherwise.

    Returns:
        The result: `.evaluation.metrics` has the metrics by name, from 0 to 1,
        and `.evaluation.intervals` their 95 % intervals. `.save(directory)`
        writes what `vit evaluate` writes. For a model of several labels an
        image these are average precision, ROC AUC and F1.

    Raises:
        ValueError: The data is unknown, it has classes that the model doesn't
            know, there is no model file to keep the operating point in, or
            the images allow none such.

    Example:
        >>> result = vit.evaluate("runs/digits")
        >>> result.evaluation.metrics["top1"]
        >>> result.evaluation.intervals["top1"]
    """
    check_data(data, dataset)
    # The validation images can't serve to choose and to measure.
    hint = "--operating-point needs a model file to keep it in, and --split test"
    is_unfit = str(model).startswith("timm:") or split in ("validation", "all")
    if operating_point is not None and is_unfit:
        raise ValueError(hint)
    # in a process group all processes share the images
    with join_processes(device) as (_, device_name):
        bundle = open_model(model, device=device_name, class_names=class_names)
        require_classifier(bundle)
        rule = None
        if operating_point is not None:
            rule = parse_rule(
                operating_point, bundle.class_names, is_multilabel=bundle.is_multilabel
            )
        labels = LabelRule(
            label_by,
            path_column,
            label_column,
            split_column=split_column,
            group_column=group_column,
        )
        splits = open_data(bundle, data, root, dataset, labels=labels, group_by=group_by)
        # the default split may be the validation images, too
        if rule is not None and (split or splits.default_split) == "validation":
            raise ValueError(hint)
        is_own = data is None and dataset is None
        # the probes of the folds have not seen the images that they predict
        found = None
        if is_own and split in (None, CROSS_VALIDATION):
            found = load_out_of_fold(bundle)
        if split == CROSS_VALIDATION and found is None:
            raise ValueError(
                f"split {split} is that of a run of vit train --folds, named without other images"
            )
        if found is not None:
            split = "train"
        source = splits.split(split)
        if isinstance(by, str):
            by = (by,)
        values = {column: read_values(source, column) for column in by}
        # All images are decoded before anything is computed: errors in them are reported first.
        images = load_images(bundle, splits, split)
        if is_own:
            images = replace(images, splits=splits)
        # one predictor for all passes: the batch size changes the last bits of logits
        predictor = BatchPredictor.from_bundle(bundle, batch_size=batch_size, precision=precision)
        notes = []
        logits = out_of_fold = None
        if found is not None:
            notes, logits = found.describe(images), found.logits
            images = found.select(images)
            out_of_fold = images, logits
        if isinstance(bundle.model, AveragedModel):
            count = len(bundle.model.models)
            notes.append(f"the mean probabilities of {count} models were measured")
        notes = _describe_images(bundle, images) + notes
        # the operating point changes what is predicted, but no logits
        fitted = bundle
        if rule is not None:
            point, said = _choose_point(bundle, predictor, splits, rule, out_of_fold)
            notes += said
            metadata = {**bundle.metadata, "operating_point": point.model_dump()}
            fitted = replace(bundle, metadata=metadata)
        notes += filter(None, [describe_decision(fitted)])
        rate = None
        if logits is None:
            start = time.perf_counter()
            logits = _predict(predictor, images, title="evaluating")
            rate = len(images) / (time.perf_counter() - start)
        scores = score_logits(
            logits,
            images.labels,
            temperature=bundle.temperature,
            thresholds=read_thresholds(fitted),
            threshold=read_class_threshold(fitted),
        )
        evaluation = _describe(fitted, images, scores, predictor, notes=notes, rate=rate)
        parts = {
            column: [texts[name] for name in images.dataset.ids] for column, texts in values.items()
        }
        update = {
            "subgroups": build_tables(parts, scores, images.dataset.groups),
            "prediction_sets": measure_sets(fitted, logits, images.labels),
        }
        return EvaluationResult(
            evaluation.model_copy(update=update),
            scores,
            images,
            fitted,
            num_examples=num_examples,
            is_main=current_process().is_main,
            has_new_values=fitted is not bundle,
        )


def _choose_point(
    bundle: Bundle,
    predictor: BatchPredictor,
    splits: DatasetSplits,
    rule: Rule,
    out_of_fold: tuple[EvaluationSet, Float32s] | None,
) -> tuple[OperatingPoint, list[str]]:
    """Choose an operating point on the validation images, or on images with the logits of a
    cross-validation; return it with sentences about it.

    Raises:
        ValueError: There is no model file to keep it in, or no such operating point.
    """
    # a model without a file is refused before anything is predicted
    find_model_file(bundle)
    if out_of_fold is None:
        images = load_images(bundle, splits, "validation")
        logits = _predict(predictor, images, title="deciding")
    else:
        images, logits = out_of_fold
    point, said = choose_operating_point(bundle, rule, images, logits)
    if was_used_for_epoch(bundle, images):
        said[0] += ", which training also used, so that it may promise a little too much"
    if out_of_fold is not None:
        said[0] += ", the measured ones, so that its rates on them are a little too good"
    return point, said


def _describe_images(bundle: Bundle, images: EvaluationSet) -> list[str]:
    """Return what a reader should know about the images, in sentences."""
    notes = list(images.dataset.notes)
    if was_used_for_epoch(bundle, images):
        notes.append(
            "training chose the model by these images, so its accuracy on them is too high: quote"
            " its accuracy on other images"
        )
    num_groups = len(set(images.dataset.groups or images.ids))
    if num_groups < len(images):
        notes.append(
            f"these {len(images):,} images are of {num_groups:,} groups, such as copies; intervals"
            " allow for that"
        )
    return notes


def _describe(
    bundle: Bundle,
    images: EvaluationSet,
    scores: Scores,
    predictor: BatchPredictor,
    *,
    notes: list[str],
    rate: float | None,
) -> Evaluation:
    """Measure scores, and record the conditions of the measurement.

    Args:
        bundle: The model, with its operating point.
        images: The images.
        scores: Their scores.
        predictor: The conditions under which the model runs.
        notes: Facts that a reader should know, in sentences.
        rate: Images per second of the evaluation; None if the model didn't run.
    """
    dataset = images.dataset
    measured = measure(scores, dataset.groups, bundle.class_names)
    overlap = None
    # a cross-validated model has seen all of them, and the probes that predict them have not
    if dataset.split != CROSS_VALIDATION:
        overlap = find_overlap(bundle, images, is_correct=scores.correct)
    return Evaluation(
        task="multilabel" if bundle.is_multilabel else "classes",
        metrics={name: find_known(value) for name, value in measured.metrics.items()},
        intervals=measured.intervals,
        per_class=measured.per_class,
        reliability=bin_confidence(scores),
        temperature=bundle.temperature,
        operating_point=bundle.operating_point.get("rule"),
        num_images=len(images),
        num_groups=len(set(dataset.groups or images.ids)),
        unreadable=[(printable(name), printable(reason)) for name, reason in dataset.unreadable],
        duplicates_of_training=overlap,
        cost=Cost(
            parameters=sum(parameter.numel() for parameter in bundle.model.parameters()),
            flops_per_image=count_flops(bundle, predictor.precision),
            images_per_second=rate,
        ),
        data=images.title or dataset.name,
        split=dataset.split,
        notes=notes,
        fingerprint=dataset.fingerprint,
        model=bundle.name,
        model_sha256=bundle.sha256,
        run_id=bundle.metadata.get("run_id"),
        conditions=_describe_conditions(predictor),
    )


@torch.no_grad()
def count_flops(bundle: Bundle, precision: Precision) -> int:
    """Count the floating-point operations of one image; a multiply-add counts as two."""
    # imports Triton, which takes seconds
    from torch.utils.flop_counter import FlopCounterMode

    net: Any = bundle.model
    # the number of operations doesn't depend on the pixels
    image = torch.zeros(1, 3, *bundle.preprocess.image_size, device=bundle.device)
    with autocast(bundle.device, precision), FlopCounterMode(display=False) as counter:
        if hasattr(net, "forward_features") and hasattr(net, "forward_head"):
            # with every token of every block, as FLOPs are usually quoted
            net.forward_head(net.forward_features(image))
        else:
            compute_logits(net, image)
    return int(counter.get_total_flops())


def _predict(predictor: BatchPredictor, images: EvaluationSet, *, title: str) -> Float32s:
    with show_progress(title, len(images), shown=current_process().is_main) as advance:
        return predictor.predict(images.read, count=len(images), on_progress=advance)


def _describe_conditions(predictor: BatchPredictor) -> dict[str, str]:
    """Return the conditions that an evaluation records, by name."""
    # `python -m vit` is the command, too
    program = Path(sys.argv[0]).name
    if program == "__main__.py":
        program = "vit"
    return {
        "device": describe_device(predictor.device),
        "processes": str(current_process().world_size),
        "precision": predictor.precision,
        "batch size": str(predictor.batch_size),
        "command": shlex.join([program, *sys.argv[1:]]),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **collect_versions(),
    }
