"""The report of an evaluation: one self-contained HTML file, for classes and for several labels."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from vit.data.preprocess import Geometry
from vit.evaluation.metrics import Scores, bin_confidence
from vit.evaluation.predictions import CROSS_VALIDATION
from vit.evaluation.report.contrast import (
    SIDE,
    Contrast,
    Mistake,
    choose_mistakes,
    explain_mistakes,
    whiten,
)
from vit.explanation.render.overlay import PatchMap, blend, resize_picture
from vit.explanation.render.page import encode_photo, encode_picture, name_model, render_page
from vit.prediction.probabilities import Bools, Floats
from vit.runtime.numbers import format_interval, format_number, format_percent

if TYPE_CHECKING:
    # A result writes its own report.
    from vit.evaluation.result import EvaluationResult

_TEMPLATE = Path(__file__).with_name("report.html.jinja")
# classes in the confusion matrix, and labels with curves
_MAX_DRAWN = 40


class Picture(NamedTuple):
    """A data address, empty where there is none, what it shows, and the sentence below it."""

    address: str
    shows: str
    caption: str = ""


def build_report(result: "EvaluationResult") -> str:
    """Build the page: HTML that needs no other file, and whose charts the browser draws."""
    evaluation, scores = result.evaluation, result.scores
    mistakes, problem = _show_mistakes(result)
    classes = evaluation.per_class
    matrix = []
    if not scores.is_multilabel and len(classes) <= _MAX_DRAWN:
        counts = np.zeros((len(classes), len(classes)), dtype=int)
        np.add.at(counts, (scores.labels, scores.predicted), 1)
        matrix = counts.tolist()
    # a label that is ranked badly, or a class with many errors, comes first; one without images last
    order = sorted(
        range(len(classes)),
        key=lambda place: (
            classes[place].f1 is None,
            classes[place].average_precision or classes[place].f1 or 0,
        ),
    )
    drawn = [place for place in order if classes[place].roc_auc is not None]
    if not scores.is_multilabel:
        # one class against the rest
        drawn = [place for place in drawn if classes[place] is evaluation.one_against_rest]
    curves = {
        place: _trace_curves(scores.probabilities[:, place], scores.mark(place)[0])
        for place in drawn[:_MAX_DRAWN]
    }
    context = {
        "e": evaluation,
        "run": name_model(evaluation.model),
        "percent": partial(format_percent, count=evaluation.num_images),
        "interval": partial(format_interval, count=evaluation.num_images),
        "number": format_number,
        "rows": [classes[place] for place in order],
        # class or label → its curves, its mistakes
        "details": [
            (classes[place], curves.get(place), mistakes.get(place, []))
            for place in order
            if place in curves or place in mistakes
        ],
        "problem": problem,
        "matrix": matrix,
        # how often the answers of each bin of confidence are right, or the labels are there
        "reliability": bin_confidence(scores)[2].tolist(),
    }
    return render_page(_TEMPLATE, context)


def _trace_curves(probabilities: Floats, is_positive: Bools) -> list[list[tuple[float, float]]]:
    """Return the points of the ROC and of the precision-recall curve of a label, in percent."""
    # scikit-learn takes a second to import
    from sklearn.metrics import precision_recall_curve, roc_curve

    false_rates, rates, _ = roc_curve(is_positive, probabilities)
    precisions, recalls, _ = precision_recall_curve(is_positive, probabilities)
    curves = []
    for columns in ((false_rates, rates), (recalls, precisions)):
        points = (100 * np.stack(columns, axis=1)).round(1).tolist()
        # most points of thousands of images are the same on a page
        curves.append(list(dict.fromkeys(map(tuple, points))))
    return curves


def _show_mistakes(result: "EvaluationResult") -> tuple[dict[int, list[Any]], str]:
    """Return name, text and pictures of the clearest mistakes by class or label, and why nothing
    explains them; empty if something does."""
    bundle, scores = result.bundle, result.scores
    mistakes = choose_mistakes(scores, result.num_examples)
    photos = [result.images.read(each.image, each.image + 1)[0] for each in mistakes]
    # without maps, a mistake has its picture alone
    contrasts: Sequence[Contrast | None] = [None] * len(mistakes)
    problem = ""
    if result.evaluation.split == CROSS_VALIDATION and mistakes:
        problem = "the model has seen these images, unlike the probes of the folds"
    elif mistakes:
        try:
            contrasts = explain_mistakes(bundle, mistakes, photos)
        except ValueError as error:
            problem = str(error)
    shown = defaultdict(list)
    # a mistake is shown also without an explanation
    for mistake, pixels, contrast in zip(mistakes, photos, contrasts, strict=True):
        path, photo = result.images.ids[mistake.image], Image.fromarray(pixels)
        pictures = [Picture(encode_photo(photo, side=SIDE), path)]
        if contrast is not None:
            map_ = _encode_signed_map(photo, contrast.values, side=SIDE)
            evidence = "evidence for the wrong answer (red) and against it (blue)"
            pictures.append(Picture(map_, f"map of {path}", evidence))
            said, address = contrast.describe(bundle.class_names), ""
            if contrast.removed:
                address = encode_photo(Image.fromarray(whiten(pixels, contrast)), side=SIDE)
            pictures.append(Picture(address, f"part of {path}", said))
        text = _describe_mistake(mistake, scores, bundle.class_names)
        shown[mistake.place].append((path, text, pictures))
    return shown, problem


def _describe_mistake(mistake: Mistake, scores: Scores, names: Sequence[str]) -> str:
    row = scores.probabilities[mistake.image].tolist()
    own, probability = (
        format_percent(row[place], len(scores)) for place in (mistake.place, mistake.predicted)
    )
    name = names[mistake.place]
    if not scores.is_multilabel:
        return f"{name} ({own}), predicted {names[mistake.predicted]} ({probability})"
    kind = "missed" if mistake.is_missed else "falsely found"
    has = ", ".join(compress(names, scores.labels[mistake.image])) or "none"
    return f"{name} {kind}, probability {probability}; labels: {has}"


def _encode_signed_map(photo: Image.Image, values: PatchMap, *, side: int) -> str:
    """Encode a signed map over the whole photo as a data address, see `encode_photo`."""
    shown = resize_picture(photo, min_side=side, max_side=side)
    # the box of the model's input is the whole photo
    geometry = Geometry(photo.size, box=(0.0, 0.0, float(photo.width), float(photo.height)))
    return encode_picture(blend(shown, values, geometry, signed=True))
