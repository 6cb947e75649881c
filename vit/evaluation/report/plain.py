"""Findings of an evaluation in plain sentences, for readers who are not engineers."""

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import torch

from vit.evaluation.metrics import Scores, count_confusions
from vit.explanation.methods.maps import compute_maps
from vit.runtime.numbers import format_percent

if TYPE_CHECKING:
    # A result writes its own report.
    from vit.evaluation.result import Evaluation, EvaluationResult

# Seconds for the maps; an image takes about as long as ten forward passes.
_MAX_SECONDS = 5.0
_PASSES_AN_IMAGE = 10
_MAX_IMAGES = 32
_BATCH = 16
_MIN_IMAGES = 8
# With fewer images of a class, its recall says little.
_MIN_SUPPORT = 5
_METHOD = "libra-removal"


def describe_in_plain_words(result: "EvaluationResult") -> list[str]:
    """Return a sentence each on the accuracy, the worst class, whether the model can be trusted
    alone, problems in the data, and where the model looks; without those that are unknown."""
    evaluation = result.evaluation
    sentences = [
        f"{evaluation.describe_accuracy()}.",
        _describe_failures(evaluation, result.scores),
        _describe_trust(evaluation),
        _describe_data(evaluation),
        _describe_maps(result),
    ]
    return [sentence for sentence in sentences if sentence]


def _describe_failures(evaluation: "Evaluation", scores: Scores) -> str:
    # a class of a few images is the worst one by chance
    rows = [
        (row.recall, row.support, row.name)
        for row in evaluation.per_class
        if row.recall is not None and row.support >= _MIN_SUPPORT
    ]
    confusions = count_confusions(scores.labels, scores.predicted, num_classes=scores.num_classes)
    if not rows or not confusions:
        return ""
    recall, support, name = min(rows, key=lambda row: row[0])
    most = confusions[0]
    names = [row.name for row in evaluation.per_class]
    return (
        f"It fails most on {name}: {round(recall * support)} of {support} images are recognised."
        f" The most frequent error is {names[most.label]} predicted as"
        f" {names[most.predicted]}: {most.count} of"
        f" {sum(pair.count for pair in confusions)} errors."
    )


def _describe_trust(evaluation: "Evaluation") -> str:
    """Judge by the prediction sets of the highest coverage that the model file holds."""
    sets = evaluation.prediction_sets
    if not sets:
        return ""
    row = max(sets, key=lambda row: row.coverage)
    if row.single_correct is None:
        return (
            "It should not be trusted alone: no prediction set has a single class at"
            f" {100 * row.coverage:.0f} % coverage."
        )
    count = evaluation.num_images
    return (
        f"It can decide {format_percent(row.single, count)} of the images alone,"
        f" {format_percent(row.single_correct, count)} of them correctly. For the others it names"
        f" several classes or none, and a person should check them. (Its prediction sets should"
        f" include the right class for {100 * row.coverage:.0f} % of the images, and do for"
        f" {format_percent(row.measured, count)}.)"
    )


def _describe_data(evaluation: "Evaluation") -> str:
    facts = []
    suspects = evaluation.examples.num_label_errors
    if suspects:
        facts.append(f"{suspects} of {evaluation.num_images:,} labels look wrong")
    overlap = evaluation.duplicates_of_training
    if overlap is not None and overlap.exact + overlap.near:
        facts.append(
            f"{overlap.exact + overlap.near} images are the same as in training, or nearly"
        )
    if evaluation.unreadable:
        facts.append(f"{len(evaluation.unreadable)} can't be read")
    checked = "suspicious label, training image or unreadable file"
    labels = ""
    if not evaluation.is_better_than_majority():
        checked = "training image or unreadable file"
        labels = (
            " Labels can't be checked: the model is no better than always predicting the most"
            " frequent class."
        )
    if facts:
        return f"Possible problems in the data: {', '.join(facts)}.{labels}"
    return f"No problems found in the data: no {checked}.{labels}"


def _describe_maps(result: "EvaluationResult") -> str:
    """Describe the maps of images spread evenly over the set; empty if the model's attention can't
    be read or the model is too slow."""
    affordable = _MAX_SECONDS * result.evaluation.cost.images_per_second / _PASSES_AN_IMAGE
    count = min(_MAX_IMAGES, int(affordable), len(result.images))
    if count < _MIN_IMAGES:
        return ""
    relevance = []
    places = np.linspace(0, len(result.images) - 1, count).round().astype(int).tolist()
    bundle = result.bundle
    with suppress(ValueError):
        for start in range(0, count, _BATCH):
            batch = places[start : start + _BATCH]
            pixels = np.concatenate([result.images.read(place, place + 1) for place in batch])
            images = bundle.preprocess.normalize(torch.from_numpy(pixels).to(bundle.device))
            _, _, (maps,) = compute_maps(bundle.model, images, methods=[_METHOD], verify=start == 0)
            relevance.append(maps.values[:, 0].clamp_min(0).cpu())
    if sum(map(len, relevance)) < count:
        return ""
    values = torch.cat(relevance)  # [n, rows, columns]
    # each image counts the same, however large its relevance is
    values = values / values.sum(dim=(1, 2), keepdim=True).clamp_min(1e-12)
    rows, columns = values.shape[1:]
    middle = values[:, rows // 4 : rows - rows // 4, columns // 4 : columns - columns // 4]
    # the fewest patches that together hold half of the relevance
    largest_first = values.flatten(1).sort(dim=1, descending=True).values
    num_half = (largest_first.cumsum(dim=1) < 0.5).sum(dim=1) + 1
    half_area = float(num_half.float().mean()) / (rows * columns)
    in_middle = float(middle.sum(dim=(1, 2)).mean())
    middle_area = middle[0].numel() / (rows * columns)
    return (
        f"Where it looks: {100 * half_area:.0f} % of the image area holds half of the evidence for"
        f" the prediction. The middle {100 * middle_area:.0f} % of the image holds"
        f" {100 * in_middle:.0f} % of it ({count} images, {_METHOD})."
    )
