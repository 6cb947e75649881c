"""The report of an evaluation: one self-contained HTML file, for classes and for several labels."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

from vit.evaluation.metrics import ClassMetrics, Scores
from vit.evaluation.out_of_fold import CROSS_VALIDATION
from vit.evaluation.report.charts import (
    build_curve_charts,
    build_reliability_chart,
    draw_confusion,
)
from vit.evaluation.report.contrast import (
    SIDE,
    Contrast,
    Mistake,
    choose_mistakes,
    explain_mistakes,
    whiten,
)
from vit.evaluation.report.learning_curve import build_curve_section
from vit.explanation.render.page import (
    encode_photo,
    encode_picture,
    encode_signed_map,
    name_model,
    render_page,
    resize_picture,
)
from vit.explanation.training_photos import Neighbour, TrainingPhotos
from vit.model.find_file import find_model
from vit.prediction.predictor import Pixels
from vit.runtime.numbers import format_interval, format_number, format_percent

if TYPE_CHECKING:
    # A result writes its own report.
    from vit.evaluation.result import Evaluation, EvaluationResult

_TEMPLATE = Path(__file__).with_name("report.html.jinja")
# rows in the table of classes; 20,000 would make a page of 6 MB
_MAX_CLASSES = 1000
# labels with curves, the lowest average precision first; more make a large page
_MAX_CURVES = 40
# With fewer images of a class, its recall says little.
_MIN_SUPPORT = 5


class Picture(NamedTuple):
    """A picture of a mistake: a data address, empty where there is none, what it shows, and the
    sentence and the name below it."""

    address: str
    shows: str
    caption: str = ""
    path: str = ""


class ShownMistake(NamedTuple):
    """A mistake as the page shows it: name of the image, label and prediction, and pictures of the
    image, of why it is wrong, and of the nearest training photos."""

    path: str
    text: str
    pictures: list[Picture]


class ShownClass(NamedTuple):
    """The curves and the mistakes of a class or label, folded below the table."""

    place: int
    metrics: ClassMetrics
    charts: list[str]
    mistakes: list[ShownMistake]


def build_report(result: "EvaluationResult") -> str:
    """Build the page: HTML that needs no other file."""
    evaluation, scores = result.evaluation, result.scores
    names = [row.name for row in evaluation.per_class]
    mistakes, problem = _show_mistakes(result)
    sentences = describe_in_plain_words(evaluation, scores)
    section = build_curve_section(find_run(evaluation.model))
    if section is not None:
        sentences.append(section.sentence)
    classes = evaluation.per_class
    if len(classes) > _MAX_CLASSES:
        # classes without images come last
        classes = sorted(classes, key=lambda row: (row.f1 is None, row.f1 or 0))[:_MAX_CLASSES]
    matrix = None
    labels = {"x_label": "probability", "y_label": "frequency"}
    if not scores.is_multilabel:
        matrix = draw_confusion(scores, names)
        labels = {}
    context = {
        "e": evaluation,
        "run": name_model(evaluation.model),
        "outputs": f"{len(names)} {'labels' if scores.is_multilabel else 'classes'}",
        "sentences": sentences,
        "warnings": evaluation.list_warnings(),
        "percent": partial(format_percent, count=evaluation.num_images),
        "interval": partial(format_interval, count=evaluation.num_images),
        "number": format_number,
        "classes": classes,
        "names": names,
        "thresholds": dict(zip(names, scores.thresholds.tolist(), strict=True)),
        "details": _choose_details(evaluation, scores, mistakes),
        "problem": problem,
        "matrix": matrix,
        "reliability": build_reliability_chart(evaluation.reliability, **labels),
        "section": section,
    }
    return render_page(_TEMPLATE, context)


def _show_mistakes(result: "EvaluationResult") -> tuple[dict[int, list[ShownMistake]], str]:
    """Return the clearest mistakes by class or label, and why nothing explains them; empty if
    something does."""
    bundle, scores = result.bundle, result.scores
    mistakes = choose_mistakes(scores, result.num_examples)
    pixels: list[Pixels] = [
        result.images.read(mistake.index, mistake.index + 1)[0] for mistake in mistakes
    ]
    # without maps and training photos, a mistake has its picture alone
    contrasts: Sequence[Contrast | None] = [None] * len(mistakes)
    neighbours: Sequence[list[Neighbour]] = [[] for _ in mistakes]
    problem = ""
    if result.evaluation.split == CROSS_VALIDATION and mistakes:
        problem = "the model has seen these images, unlike the probes of the folds"
    elif mistakes:
        # they are the ones that the model file names, if they are on this machine
        photos = TrainingPhotos(bundle, side=SIDE, splits=result.images.splits)
        if scores.is_multilabel:
            neighbours = photos.find(pixels, 2)
        else:
            classes = [(mistake.place, mistake.predicted) for mistake in mistakes]
            neighbours = photos.find_of_classes(pixels, classes)
        try:
            contrasts = explain_mistakes(bundle, mistakes, pixels)
        except ValueError as error:
            problem = str(error)
    shown: dict[int, list[ShownMistake]] = defaultdict(list)
    # a mistake is shown also without an explanation
    rows = zip(mistakes, pixels, contrasts, neighbours, strict=True)
    for mistake, photo, contrast, nearest in rows:
        path, image = result.images.ids[mistake.index], Image.fromarray(photo)
        pictures = [Picture(encode_picture(resize_picture(image)), path)]
        if contrast is not None:
            pictures += _draw_contrast(contrast, photo, path, bundle.class_names)
        pictures += [
            Picture(
                each.picture or "",
                f"training photo {each.path}",
                f"most similar in training: {each.class_name} {each.similarity:.2f}",
                each.path,
            )
            for each in nearest
        ]
        text = _describe_mistake(mistake, scores, bundle.class_names)
        shown[mistake.place].append(ShownMistake(path, text, pictures))
    return shown, problem


def _describe_mistake(mistake: Mistake, scores: Scores, names: Sequence[str]) -> str:
    percent = partial(format_percent, count=len(scores))
    name, row = names[mistake.place], scores.probabilities[mistake.index].tolist()
    probability = percent(row[mistake.predicted])
    if not scores.is_multilabel:
        own = percent(row[mistake.place])
        return f"{name} ({own}), predicted {names[mistake.predicted]} ({probability})"
    has = ", ".join(compress(names, scores.labels[mistake.index])) or "none"
    kind = "missed" if mistake.is_missed else "falsely found"
    return f"{name} {kind}, probability {probability}; labels: {has}"


def _draw_contrast(
    contrast: Contrast, photo: Pixels, path: str, names: Sequence[str]
) -> list[Picture]:
    """Draw why an image has a wrong prediction: the map over the photo, and the photo without the
    patches that change the prediction."""
    address = encode_signed_map(Image.fromarray(photo), contrast.values, side=SIDE)
    evidence = "evidence for the wrong answer (red) and against it (blue)"
    pictures = [Picture(address, f"map of {path}", evidence)]
    count = len(contrast.removed)
    if not count:
        said = "Removing up to a quarter of the patches does not change the prediction."
        return [*pictures, Picture("", "", said)]
    answer = "the answer is right"
    if contrast.answer is not None:
        answer = f"it is predicted as {names[contrast.answer]}"
    address = encode_photo(Image.fromarray(whiten(photo, contrast)), side=SIDE)
    shows = "without the patches that change the prediction"
    said = f"without {count} patch{'es' * (count > 1)} {answer}"
    return [*pictures, Picture(address, shows, said)]


def _choose_details(
    evaluation: "Evaluation", scores: Scores, mistakes: Mapping[int, list[ShownMistake]]
) -> list[ShownClass]:
    """Return the classes with curves or mistakes, the worst first."""
    rest = evaluation.one_against_rest
    # a label that is ranked badly, or a class with many errors
    rows = sorted(
        enumerate(evaluation.per_class),
        key=lambda item: (item[1].average_precision or item[1].f1 or 0, item[0]),
    )
    details: list[ShownClass] = []
    for place, row in rows:
        charts: list[str] = []
        has_curves = bool(row.thresholds) and (row is rest or evaluation.is_multilabel)
        if has_curves and len(details) < _MAX_CURVES:
            charts = build_curve_charts(
                scores.probabilities[:, place], scores.mark(place)[0], row.thresholds[0]
            )
        if charts or mistakes.get(place):
            details.append(ShownClass(place, row, charts, mistakes.get(place, [])))
    return details


def describe_in_plain_words(evaluation: "Evaluation", scores: Scores) -> list[str]:
    """Return a sentence each on guessing, the worst class, whether the model can be trusted alone,
    and problems in the data; without those that are unknown."""
    describe = {True: _describe_labels, False: _describe_failures}[scores.is_multilabel]
    sentences = [
        evaluation.describe_guessing(),
        describe(evaluation, scores),
        _describe_trust(evaluation),
        _describe_data(evaluation),
    ]
    return list(filter(None, sentences))


def _describe_failures(evaluation: "Evaluation", scores: Scores) -> str:
    is_wrong = scores.labels != scores.predicted
    if not is_wrong.any():
        return ""
    # a class of a few images is the worst one by chance
    rows = [
        (row.recall, row.support, row.name)
        for row in evaluation.per_class
        if row.recall is not None and row.recall < 1 and row.support >= _MIN_SUPPORT
    ]
    sentences = []
    if rows:
        recall, support, name = min(rows, key=lambda row: row[0])
        hits = round(recall * support)
        sentences.append(f"It fails most on {name}: {hits} of {support} images are recognised.")
    # a matrix of all pairs of classes might not fit into memory
    errors = np.stack([scores.labels[is_wrong], scores.predicted[is_wrong]])
    pairs, counts = np.unique(errors, axis=1, return_counts=True)
    label, predicted = (evaluation.per_class[place].name for place in pairs[:, counts.argmax()])
    if counts.max() > 1:
        sentences.append(
            f"The most frequent error is {label} predicted as {predicted}:"
            f" {counts.max()} of {counts.sum()} errors."
        )
    return " ".join(sentences)


def _describe_labels(evaluation: "Evaluation", scores: Scores) -> str:
    missed = int((scores.labels & ~scores.predicted).sum())
    false = int((scores.predicted & ~scores.labels).sum())
    total = int(scores.labels.sum())
    text = f"{missed:,} of {total:,} labels are missed; {false:,} are falsely found."
    known = [row for row in evaluation.per_class if row.average_precision is not None]
    if len(known) > 1:
        worst = min(known, key=lambda row: row.average_precision or 0.0)
        hits = round((worst.recall or 0) * worst.support)
        text += (
            f" It is worst on {worst.name}: {hits} of {worst.support} images that have it are"
            f" found, and {worst.predicted - hits} others."
        )
    return text


def _describe_trust(evaluation: "Evaluation") -> str:
    row = evaluation.prediction_sets
    if row is None:
        return ""
    if row.single_correct is None:
        return (
            "It should not be trusted alone: no prediction set has a single class at"
            f" {100 * row.coverage:.0f} % coverage."
        )
    percent = partial(format_percent, count=evaluation.num_images)
    return (
        f"It can decide {percent(row.single)} of the images alone, {percent(row.single_correct)}"
        " of them correctly. For the others it names several classes or none, and a person should"
        " check them. (Its prediction sets should include the right class for"
        f" {100 * row.coverage:.0f} % of the images, and do for {percent(row.measured)}.)"
    )


def _describe_data(evaluation: "Evaluation") -> str:
    facts, clean, unknown = [], [], ""
    overlap = evaluation.duplicates_of_training
    if overlap is None:
        unknown = " Whether the model was trained on some of the images isn't known."
    elif overlap.exact + overlap.near:
        facts.append(
            f"{overlap.exact + overlap.near} images are the same as in training, or nearly"
        )
    else:
        clean.append("training image")
    if evaluation.unreadable:
        facts.append(f"{len(evaluation.unreadable)} can't be read")
    else:
        clean.append("unreadable file")
    if facts:
        return f"Possible problems in the data: {', '.join(facts)}.{unknown}"
    return f"No problems found in the data: no {' or '.join(clean)}.{unknown}"


def find_run(model: str) -> Path | None:
    """Return the run that a model file lies in; None for a model without a file."""
    with suppress(OSError, ValueError):
        found = find_model(model)
        return found.parent if isinstance(found, Path) and found.is_file() else None
    # the file may have been moved since
    path = Path(model)
    return path.parent if path.suffix == ".safetensors" else None
