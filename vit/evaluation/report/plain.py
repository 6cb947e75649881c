"""What an evaluation found, in plain sentences for someone who isn't an engineer."""

from contextlib import suppress

import numpy as np
import torch

from vit.evaluation.metrics import Scores
from vit.evaluation.result import EvaluationResult
from vit.evaluation.schema import Evaluation
from vit.explanation.methods.registry import compute_maps

# of the maps of what the model looks at; an image takes about so many forward passes
_MAX_SECONDS = 5.0
_PASSES_AN_IMAGE = 10
_MAX_IMAGES = 32
_BATCH = 16
_MIN_IMAGES = 8
# of a class, below which its recall says little
_MIN_SUPPORT = 5
_METHOD = "libra-removal"


def describe_in_plain_words(result: EvaluationResult) -> list[str]:
    """How often it is right, where it fails, whether it may be trusted alone, what looks wrong in
    the data, what it looks at; those of which something is known."""
    evaluation = result.evaluation
    sentences = [
        f"{evaluation.describe_accuracy()}.",
        _describe_failures(evaluation, result.scores),
        _describe_trust(evaluation),
        _describe_data(evaluation),
        _describe_maps(result),
    ]
    return [sentence for sentence in sentences if sentence]


def _describe_failures(evaluation: Evaluation, scores: Scores) -> str:
    rows = [row for row in evaluation.per_class if row.support >= _MIN_SUPPORT]
    is_wrong = scores.labels != scores.predicted
    if not rows or not is_wrong.any():
        return ""
    worst = min(rows, key=lambda row: row.recall)
    text = f"It fails most on {worst.name}: {worst.recall:.0%} of {worst.support} are recognised"
    cells, counts = np.unique(
        scores.labels[is_wrong] * scores.num_classes + scores.predicted[is_wrong],
        return_counts=True,
    )
    label, predicted = divmod(int(cells[counts.argmax()]), scores.num_classes)
    names = [row.name for row in evaluation.per_class]
    return (
        f"{text}; the most frequent error is {names[label]} taken for {names[predicted]}"
        f" ({counts.max()} of {is_wrong.sum()} errors)."
    )


def _describe_trust(evaluation: Evaluation) -> str:
    """By the sets of the highest coverage that the model file holds."""
    sets = evaluation.prediction_sets
    if not sets:
        return ""
    row = max(sets, key=lambda row: row.coverage)
    if row.single_correct is None:
        return (
            "It should not be trusted alone: in no image does a single class remain at"
            f" {row.coverage:.0%} coverage."
        )
    return (
        f"Alone it may answer {row.single:.0%} of the images, of which {row.single_correct:.1%} are"
        f" right; for the others it names several classes or none, and a person should look (sets"
        f" that promise {row.coverage:.0%}, and held the right class in {row.measured:.1%})."
    )


def _describe_data(evaluation: Evaluation) -> str:
    facts = []
    suspects = evaluation.examples.num_label_errors
    if suspects:
        facts.append(f"{suspects} of {evaluation.num_images:,} labels look wrong")
    overlap = evaluation.duplicates_of_training
    if overlap is not None and overlap.exact + overlap.near:
        facts.append(f"{overlap.exact + overlap.near} images are also in training, or nearly")
    if evaluation.unreadable:
        facts.append(f"{len(evaluation.unreadable)} can't be read")
    if not facts:
        return "Nothing looks wrong in the data: no label, copy or file that stands out."
    return f"In the data, {', '.join(facts)}."


def _describe_maps(result: EvaluationResult) -> str:
    """Of images spread evenly over the set; empty for a model whose attention can't be read, or one
    too slow for it."""
    affordable = _MAX_SECONDS * result.evaluation.cost.images_per_second / _PASSES_AN_IMAGE
    count = min(_MAX_IMAGES, int(affordable), len(result.images))
    if count < _MIN_IMAGES:
        return ""
    relevance = []
    places = np.linspace(0, len(result.images) - 1, count).round().astype(int).tolist()
    bundle = result.bundle
    device = next(bundle.model.parameters()).device
    with suppress(ValueError):
        for start in range(0, count, _BATCH):
            batch = places[start : start + _BATCH]
            pixels = np.concatenate([result.images.read(place, place + 1) for place in batch])
            images = bundle.preprocess.normalize(torch.from_numpy(pixels).to(device))
            _, _, (maps,) = compute_maps(bundle.model, images, methods=[_METHOD], verify=start == 0)
            relevance.append(maps.values[:, 0].clamp_min(0).cpu())
    if sum(map(len, relevance)) < count:
        return ""
    values = torch.cat(relevance)  # [n, rows, columns]
    values = values / values.sum(dim=(1, 2), keepdim=True).clamp_min(1e-12)
    rows, columns = values.shape[1:]
    middle = values[:, rows // 4 : rows - rows // 4, columns // 4 : columns - columns // 4]
    largest_first = values.flatten(1).sort(dim=1, descending=True).values
    num_half = (largest_first.cumsum(dim=1) < 0.5).sum(dim=1) + 1
    return (
        f"What it looks at: half of what speaks for an answer lies on"
        f" {float(num_half.float().mean()) / (rows * columns):.0%} of the image, and"
        f" {float(middle.sum(dim=(1, 2)).mean()):.0%} in the middle, which is"
        f" {middle[0].numel() / (rows * columns):.0%} of it ({count} images, {_METHOD})."
    )
