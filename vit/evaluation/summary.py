"""Logits and images to an `Evaluation`."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from vit.bundle import Bundle
from vit.config import restore_old_keys
from vit.evaluation.cost import Cost
from vit.evaluation.errors import find_confident_mistakes, find_label_errors, find_uncertain_hits
from vit.evaluation.images import Images, count_duplicates, printable
from vit.evaluation.intervals import compute_intervals
from vit.evaluation.metrics import (
    Ints,
    Scores,
    compute_confusion,
    compute_figures,
    compute_per_class,
    compute_reliability,
    score_logits,
)
from vit.evaluation.predictor import Logits
from vit.evaluation.result import Calibration, Evaluation, Example, Examples
from vit.evaluation.robustness import Sweep

_OF_THE_MACHINE = {"data": ("root", "workers", "cache_dir", "memory_share"), "train": ("seed", "device")}


def summarize(
    logits: Logits,
    images: Images,
    bundle: Bundle,
    *,
    num_examples: int,
    corruptions: dict[str, list[float]] | None,
    sweeps: dict[str, Sweep] | None,
    cost: Cost,
    conditions: Mapping[str, str],
) -> tuple[Evaluation, Scores]:
    """Everything that is known of `bundle` on `images`, and what each image contributed to it."""
    scores = score_logits(logits, images.labels, temperature=bundle.temperature)
    errors = None
    if corruptions:
        cells = [1 - top1 for severities in corruptions.values() for top1 in severities]
        errors = sum(cells) / len(cells)
    evaluation = Evaluation.model_validate(
        {
            **compute_figures(scores),
            "intervals": compute_intervals(scores),
            "per_class": compute_per_class(compute_confusion(scores), bundle.class_names),
            "reliability": compute_reliability(scores),
            "calibration": _describe_calibration(bundle, logits, images.labels),
            "num_images": len(scores),
            "unreadable": [(printable(name), printable(why)) for name, why in images.dataset.unreadable],
            "duplicates_of_training": (
                count_duplicates(images, bundle.training_hashes) if bundle.training_hashes else None
            ),
            "examples": _choose_examples(scores, logits, images, bundle, count=num_examples),
            "corruptions": corruptions,
            "mean_corruption_error": errors,
            "sweeps": sweeps or None,
            "cost": cost,
            "data": images.dataset.name,
            "split": images.dataset.split,
            "notes": list(images.dataset.notes),
            "fingerprint": images.dataset.fingerprint,
            "model": bundle.name,
            "model_sha256": bundle.sha256,
            "recipe": hash_recipe(bundle.config),
            "seed": bundle.config.get("train", {}).get("seed"),
            "conditions": dict(conditions),
        }
    )
    return evaluation, scores


def hash_recipe(config: Mapping[str, Any]) -> str | None:
    """The same for training configurations that differ in the seed or the machine alone; None without one."""
    if not config:
        return None
    # under the keys' first names: evaluations on disk hold hashes of those
    kept = {
        section: {key: value for key, value in values.items() if key not in _OF_THE_MACHINE.get(section, ())}
        for section, values in restore_old_keys(config).items()
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _describe_calibration(bundle: Bundle, logits: Logits, labels: Ints) -> Calibration | None:
    if "temperature" not in bundle.metadata:
        return None
    before = compute_figures(score_logits(logits, labels))
    after = compute_figures(score_logits(logits, labels, temperature=bundle.temperature))
    names = ("ece", "brier", "nll")
    return Calibration(
        temperature=bundle.temperature,
        fitted_on=bundle.metadata.get("temperature_fitted_on", {}),
        before={name: before[name] for name in names},
        after={name: after[name] for name in names},
    )


def _choose_examples(
    scores: Scores, logits: Logits, images: Images, bundle: Bundle, *, count: int
) -> Examples:
    def describe(indices: Ints) -> list[Example]:
        return [
            Example(
                path=images.ids[index],
                label=bundle.class_names[scores.labels[index]],
                predicted=bundle.class_names[scores.predicted[index]],
                probability=float(scores.confidence[index]),
                label_probability=float(scores.label_probability[index]),
            )
            for index in indices.tolist()
        ]

    suspects, num_suspects = find_label_errors(
        logits, images.labels, temperature=bundle.temperature, count=count
    )
    return Examples(
        confident_mistakes=describe(find_confident_mistakes(scores, count=count)),
        uncertain_hits=describe(find_uncertain_hits(scores, count=count)),
        label_errors=describe(suspects),
        num_label_errors=num_suspects,
    )
