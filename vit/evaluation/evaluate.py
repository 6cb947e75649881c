"""A model and images to an `EvaluationResult`: what `vit evaluate` and `vit.evaluate` do."""

import datetime
import hashlib
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vit.bundle import MODEL_FILE, Bundle, collect_versions, load_bundle, update_metadata
from vit.config import restore_old_keys
from vit.evaluation import errors, metrics, schema
from vit.evaluation.calibration import fit_temperature
from vit.evaluation.cost import measure_cost
from vit.evaluation.evaluated_images import Images, count_duplicates, printable
from vit.evaluation.intervals import compute_intervals
from vit.evaluation.metrics import Ints, Scores, score_logits
from vit.evaluation.plots import draw_confusion
from vit.evaluation.predictor import Logits, Predictor
from vit.evaluation.robustness import measure_corruptions, measure_rotations, measure_shifts
from vit.evaluation.schema import Evaluation
from vit.runtime.device import describe_device
from vit.runtime.files import write_text
from vit.runtime.output_dir import prepare_output
from vit.runtime.processes import current_process
from vit.runtime.progress import show_progress

_OF_THE_MACHINE = {
    "data": ("root", "workers", "cache_dir", "memory_share", "remote_cache_gb"),
    "train": ("seed", "device"),
}


@dataclass(frozen=True)
class EvaluationResult:
    """An `Evaluation`, and what each image contributed to it.

    `pages` are further files that `save` writes: names, and functions of this result that give the text.
    """

    evaluation: Evaluation
    scores: Scores
    images: Images
    bundle: Bundle
    is_main: bool = True  # of several processes the one that writes files
    pages: Mapping[str, Callable[["EvaluationResult"], str]] = field(default_factory=dict)

    def save(self, directory: str | Path, *, overwrite: bool = False) -> None:
        """Write evaluation.json (last), predictions.csv, confusion.png and the pages into a new `directory`.

        Raises FileExistsError where it holds something already, unless `overwrite` is given and we made it.
        """
        if not self.is_main:
            return
        names, ids = self.bundle.class_names, self.images.ids
        texts = {name: build(self) for name, build in self.pages.items()}  # before anything is written
        directory = prepare_output(Path(directory), overwrite=overwrite)
        schema.save_predictions(directory / schema.PREDICTIONS_FILE, self.scores, ids=ids, class_names=names)
        draw_confusion(self.scores, class_names=names, path=directory / "confusion.png")
        for name, text in texts.items():
            write_text(directory / name, text)
        schema.save_evaluation(directory / schema.EVALUATION_FILE, self.evaluation)


def evaluate_bundle(
    bundle: Bundle,
    images: Images,
    *,
    validation: Images | None = None,
    corruptions: bool = False,
    shift: bool = False,
    rotate: bool = False,
    mirrored: bool = False,
    num_examples: int = 16,
    batch_size: int | None = None,
    precision: str = "auto",
) -> EvaluationResult:
    """Measure `bundle`, on the device it is on, on `images`.

    With `validation` images a temperature is fitted on them first and kept in the model file. `corruptions`,
    `shift` and `rotate` add the top-1 accuracy on images changed so. In a process group all processes share the
    images, and each gets the same result. Raises ValueError for a temperature without a model file to keep it.
    """
    process = current_process()
    predictor = Predictor.from_bundle(bundle, batch_size=batch_size, precision=precision, mirrored=mirrored)
    if validation is not None:
        bundle = _calibrate(bundle, validation, predictor)
    logits = _predict(predictor, images, title="evaluating")
    corrupted = measure_corruptions(predictor, images) if corruptions else None
    # their mean is the mean corruption error, here not divided by a baseline's
    errors_of_corrupted = [1 - top1 for severities in (corrupted or {}).values() for top1 in severities]
    sweeps = measure_shifts(predictor, images) if shift else {}
    sweeps |= measure_rotations(predictor, images) if rotate else {}
    cost = None
    if process.is_main:
        pixels = torch.from_numpy(images.read(0, predictor.batch_size).copy()).to(predictor.device)
        cost = measure_cost(predictor.model, predictor.preprocess.normalize(pixels), precision=predictor.precision)
    cost = process.broadcast(cost)  # the other processes wait: their work would slow what is timed
    scores = score_logits(logits, images.labels, temperature=bundle.temperature)
    evaluation = Evaluation.model_validate(
        {
            **metrics.compute_metrics(scores),
            "intervals": compute_intervals(scores),
            "per_class": metrics.compute_per_class(scores, bundle.class_names),
            "reliability": metrics.compute_reliability(scores),
            "calibration": _describe_calibration(bundle, logits, images.labels),
            "examples": _choose_examples(logits, scores, images.ids, bundle.class_names, count=num_examples),
            "corruptions": corrupted,
            "mean_corruption_error": sum(errors_of_corrupted) / len(errors_of_corrupted) if corrupted else None,
            "sweeps": sweeps or None,
            "cost": cost,
            **_describe_origin(images, bundle),
            "conditions": _describe_conditions(predictor),
        }
    )
    return EvaluationResult(evaluation, scores, images, bundle, is_main=process.is_main)


def _predict(predictor: Predictor, images: Images, *, title: str) -> Logits:
    with show_progress(title, len(images), shown=current_process().is_main) as advance:
        return predictor.predict(images.read, count=len(images), on_progress=advance)


def _calibrate(bundle: Bundle, validation: Images, predictor: Predictor) -> Bundle:
    """Fit the temperature on the validation images, keep it in the model file, load that again."""
    path = Path(bundle.name, MODEL_FILE) if Path(bundle.name).is_dir() else Path(bundle.name)
    if not path.is_file():
        raise ValueError(f"{bundle.name} is no model file; calibration keeps the temperature in one")
    process, source = current_process(), validation.dataset
    logits = _predict(predictor, validation, title="calibrating")
    if process.is_main:
        fitted_on = {"split": source.split, "num_images": len(validation), "fingerprint": source.fingerprint}
        temperature = fit_temperature(logits, validation.labels)
        update_metadata(path, temperature=temperature, temperature_fitted_on=fitted_on)
    process.wait()
    return load_bundle(bundle.name, device=predictor.device)


def _describe_origin(images: Images, bundle: Bundle) -> dict[str, Any]:
    dataset, hashes = images.dataset, bundle.training_hashes
    return {
        "num_images": len(images),
        "unreadable": [(printable(name), printable(why)) for name, why in dataset.unreadable],
        "duplicates_of_training": None if hashes is None else count_duplicates(images, hashes),
        "data": dataset.name,
        "split": dataset.split,
        "notes": list(dataset.notes),
        "fingerprint": dataset.fingerprint,
        "model": bundle.name,
        "model_sha256": bundle.sha256,
        "run_id": bundle.metadata.get("run_id"),
        "recipe": _hash_recipe(bundle.config),
        "seed": bundle.config.get("train", {}).get("seed"),
    }


def _hash_recipe(config: Mapping[str, Any]) -> str | None:
    """The same for training configurations that differ in the seed or the machine alone; None without one."""
    if not config:
        return None
    # under the keys' first names: evaluations on disk hold hashes of those
    kept = {
        section: {key: value for key, value in values.items() if key not in _OF_THE_MACHINE.get(section, ())}
        for section, values in restore_old_keys(config).items()
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _describe_conditions(predictor: Predictor) -> dict[str, str]:
    program = Path(sys.argv[0]).name
    return {
        "device": describe_device(predictor.device),
        "processes": str(current_process().world_size),
        "precision": predictor.precision,
        "batch size": str(predictor.batch_size),
        "test-time augmentation": "mirrored" if predictor.mirrored else "none",
        "command": shlex.join(["vit" if program == "__main__.py" else program, *sys.argv[1:]]),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **collect_versions(),
    }


def _describe_calibration(bundle: Bundle, logits: Logits, labels: Ints) -> schema.Calibration | None:
    if "temperature" not in bundle.metadata:
        return None

    def measure(temperature: float) -> dict[str, float]:
        measured = metrics.compute_metrics(score_logits(logits, labels, temperature=temperature))
        return {name: measured[name] for name in ("ece", "brier", "nll")}

    fitted_on = bundle.metadata.get("temperature_fitted_on", {})
    return schema.Calibration(bundle.temperature, fitted_on, measure(1.0), measure(bundle.temperature))


def _choose_examples(
    logits: Logits, scores: Scores, ids: Sequence[str], names: Sequence[str], *, count: int
) -> schema.Examples:
    def describe(indices: Ints) -> list[schema.Example]:
        columns = (
            [ids[index] for index in indices],
            [names[label] for label in scores.labels[indices]],
            [names[label] for label in scores.predicted[indices]],
            scores.confidence[indices].tolist(),
            scores.label_probability[indices].tolist(),
        )
        return [schema.Example(*row) for row in zip(*columns, strict=True)]

    label_errors, num_label_errors = errors.find_label_errors(logits, scores, count=count)
    return schema.Examples(
        confident_mistakes=describe(errors.find_confident_mistakes(scores, count=count)),
        uncertain_hits=describe(errors.find_uncertain_hits(scores, count=count)),
        label_errors=describe(label_errors),
        num_label_errors=num_label_errors,
    )
