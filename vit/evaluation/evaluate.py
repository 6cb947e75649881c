"""A model and images to an `EvaluationResult`: what `vit evaluate` and `vit.evaluate` do."""

import datetime
import hashlib
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vit.bundle import MODEL_FILE, Bundle, collect_versions
from vit.data.dataset import printable
from vit.evaluation.calibration import (
    calibrate,
    chose_epoch,
    find_model_file,
    measure_calibration,
    save_temperature,
)
from vit.evaluation.confusion import plot_confusion
from vit.evaluation.cost import Cost, measure_cost
from vit.evaluation.examples import choose_examples
from vit.evaluation.images import EvaluationSet
from vit.evaluation.intervals import compute_intervals
from vit.evaluation.metrics import Scores, compute_metrics, compute_reliability, score_logits
from vit.evaluation.overlap import count_duplicates, find_training_hashes
from vit.evaluation.per_class import compute_per_class
from vit.evaluation.prediction_sets import measure_sets
from vit.evaluation.schema import (
    EVALUATION_FILE,
    PREDICTIONS_FILE,
    Evaluation,
    save_evaluation,
    save_predictions,
)
from vit.options import EvaluateOptions
from vit.prediction.predictor import LogitArray, Predictor
from vit.runtime.device import describe_device
from vit.runtime.files import expand_home, prepare_output, write_atomically, write_text
from vit.runtime.processes import current_process
from vit.runtime.products import find_product
from vit.runtime.progress import show_progress

_WARM_UP = 3
# spent on each of latency and throughput
_SECONDS = 2.0
_MIN_REPETITIONS = 5
_MAX_REPETITIONS = 200
# keys of the configuration that don't make another recipe: where the data lies, the machine, the
# seed, what the model file keeps of the images
_MACHINE_KEYS = {
    "data": ("root", "workers", "cache_dir"),
    "train": ("seed", "device", "max_training_features"),
}


# the text of each page for readers, by its file name
RenderPages = Callable[["EvaluationResult"], Mapping[str, str]]


@dataclass(frozen=True, repr=False)
class EvaluationResult:
    """An `Evaluation`, and what each image contributed to it."""

    evaluation: Evaluation
    scores: Scores
    images: EvaluationSet
    bundle: Bundle
    # of several processes the one that writes files
    is_main: bool = True
    render_pages: RenderPages | None = None
    # a temperature that is in no model file yet: `save` writes one
    has_new_temperature: bool = False

    def __repr__(self) -> str:
        return f"EvaluationResult{repr(self.evaluation).removeprefix('Evaluation')}"

    def _repr_html_(self) -> str:
        """The metrics as a table, in a notebook."""
        return self.evaluation._repr_html_()

    def save(self, directory: str | Path, *, overwrite: bool = False) -> None:
        """Write evaluation.json (last), predictions.csv, confusion.png and the pages, and where a
        temperature was fitted, the model file with it.

        Args:
            directory: a new or empty directory.
            overwrite: replace an earlier evaluation in it.

        Raises:
            FileExistsError: it holds files, and `overwrite` is not set or they are not ours.
            ValueError: it holds the evaluated model.
        """
        if not self.is_main:
            return
        if Path(self.bundle.name).resolve().is_relative_to(expand_home(directory).resolve()):
            raise ValueError(f"{directory} holds the evaluated model; choose another --output")
        # before anything is written: a page that fails leaves no directory
        pages = self.render_pages(self) if self.render_pages else {}
        output = prepare_output(directory, overwrite=overwrite)
        class_names = self.bundle.class_names
        save_predictions(
            output / PREDICTIONS_FILE, self.scores, ids=self.images.ids, class_names=class_names
        )
        figure = plot_confusion(self.scores, class_names=class_names)
        write_atomically(output / "confusion.png", partial(figure.savefig, format="png", dpi=120))
        for name, text in pages.items():
            write_text(output / name, text)
        evaluation = self.evaluation
        if self.has_new_temperature:
            # it is an evaluation of this file
            sha256 = save_temperature(self.bundle, output / MODEL_FILE)
            evaluation = evaluation.model_copy(update={"model_sha256": sha256})
        save_evaluation(output / EVALUATION_FILE, evaluation)


def evaluate_bundle(
    bundle: Bundle,
    images: EvaluationSet,
    validation: EvaluationSet | None = None,
    *,
    options: EvaluateOptions,
    render_pages: RenderPages | None = None,
) -> EvaluationResult:
    """Measure a model; in a process group all processes share the images, and each gets the result.

    Args:
        bundle: the model, on its device.
        images: to measure on.
        validation: fit a temperature on these first, and keep it if it helps.
        options: what is measured, and how.
        render_pages: makes the pages that `save` writes.

    Raises:
        ValueError: a temperature, but no model file to keep it.
    """
    process = current_process()
    predictor = Predictor.from_bundle(
        bundle,
        batch_size=options.batch_size,
        precision=options.precision,
        tta=options.tta,
    )
    notes = list(images.dataset.notes)
    validation_split = bundle.data.get("splits", {}).get("validation", {})
    if images.dataset.fingerprint == validation_split.get("fingerprint"):
        notes.append(
            "these images chose the best epoch of this model, which favours it: quote its accuracy"
            " on others"
        )
    groups = images.dataset.groups
    num_groups = len(set(groups or images.ids))
    if num_groups < len(images):
        notes.append(
            f"these {len(images):,} images are of {num_groups:,} groups, such as copies: intervals"
            " allow for that, but those of single classes and of the calibration error don't"
        )
    has_new_temperature = False
    if validation is not None:
        model_file = find_model_file(bundle)
        validation_logits = None
        if not chose_epoch(bundle, validation):
            validation_logits = _predict(predictor, validation, title="calibrating")
        calibrated, sentence = calibrate(bundle, validation, validation_logits)
        notes.append(sentence)
        has_new_temperature = calibrated is not bundle
        bundle = calibrated
        if has_new_temperature and options.in_place:
            if process.is_main:
                bundle = replace(bundle, sha256=save_temperature(bundle, model_file))
            bundle = replace(bundle, sha256=process.broadcast(bundle.sha256))
            has_new_temperature = False
    logits = _predict(predictor, images, title="evaluating")

    corruptions = None
    mean_corruption_error = None
    if options.corruptions:
        measure_corruptions = find_product("corruptions")
        if measure_corruptions is None:
            raise ValueError("this installation of vit can't measure corruptions; leave them out")
        corruptions = measure_corruptions(predictor, images)
        # here not divided by a baseline's
        errors = [1 - top1 for severities in corruptions.values() for top1 in severities]
        mean_corruption_error = sum(errors) / len(errors)

    # the other processes wait: their work would slow what is timed
    cost: Cost | None = None
    if process.is_main:
        pixels = torch.from_numpy(np.array(images.read(0, predictor.batch_size)))
        inputs = predictor.preprocess.normalize(pixels.to(predictor.device))
        cost = measure_cost(predictor.model, inputs, precision=predictor.precision)
    cost = process.broadcast(cost)
    assert cost is not None

    scores = score_logits(logits, images.labels, temperature=bundle.temperature)
    training_hashes = find_training_hashes(bundle)
    overlap = None
    if training_hashes is not None:
        overlap = count_duplicates(images, training_hashes, is_correct=scores.correct)
    dataset = images.dataset
    evaluation = Evaluation(
        **compute_metrics(scores),
        intervals=compute_intervals(scores, groups),
        per_class=compute_per_class(scores, bundle.class_names),
        reliability=compute_reliability(scores),
        calibration=measure_calibration(bundle, logits, images.labels),
        prediction_sets=measure_sets(bundle, logits, images.labels),
        num_images=len(images),
        unreadable=[(printable(name), printable(reason)) for name, reason in dataset.unreadable],
        duplicates_of_training=overlap,
        examples=choose_examples(
            logits,
            scores,
            ids=images.ids,
            class_names=bundle.class_names,
            count=options.num_examples,
        ),
        corruptions=corruptions,
        mean_corruption_error=mean_corruption_error,
        cost=cost,
        data=dataset.name,
        split=dataset.split,
        notes=notes,
        fingerprint=dataset.fingerprint,
        model=bundle.name,
        model_sha256=bundle.sha256,
        run_id=bundle.metadata.get("run_id"),
        training_fingerprint=bundle.data.get("fingerprint"),
        recipe=_hash_recipe(bundle.config),
        seed=bundle.config.get("train", {}).get("seed"),
        conditions=_describe_conditions(predictor),
    )
    return EvaluationResult(
        evaluation=evaluation,
        scores=scores,
        images=images,
        bundle=bundle,
        is_main=process.is_main,
        render_pages=render_pages,
        has_new_temperature=has_new_temperature,
    )


def _predict(predictor: Predictor, images: EvaluationSet, *, title: str) -> LogitArray:
    with show_progress(title, len(images), shown=current_process().is_main) as advance:
        return predictor.predict(images.read, count=len(images), on_progress=advance)


def _hash_recipe(config: Mapping[str, Any]) -> str | None:
    """The same for training configurations that differ in the seed or the machine alone; None
    without one."""
    if not config:
        return None
    recipe = {
        section: {
            key: value for key, value in values.items() if key not in _MACHINE_KEYS.get(section, ())
        }
        for section, values in config.items()
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def _describe_conditions(predictor: Predictor) -> dict[str, str | None]:
    program = Path(sys.argv[0]).name
    if program == "__main__.py":
        program = "vit"
    return {
        "device": describe_device(predictor.device),
        "processes": str(current_process().world_size),
        "precision": predictor.precision,
        "batch size": str(predictor.batch_size),
        "tta": None if predictor.tta == "none" else predictor.tta,
        "command": shlex.join([program, *sys.argv[1:]]),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **collect_versions(),
    }
