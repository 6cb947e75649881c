"""The report of an evaluation: one self-contained HTML file, for classes and for several labels."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from vit.bundle import Bundle
from vit.evaluation.metrics import ClassMetrics, Scores, count_confusions
from vit.evaluation.out_of_fold import CROSS_VALIDATION
from vit.evaluation.report.charts import (
    build_curve_charts,
    build_history_chart,
    build_reliability_chart,
    build_selective_chart,
    draw_confusion,
)
from vit.evaluation.report.contrast import SIDE, Mistake, choose_mistakes, draw_contrasts
from vit.explanation.render.page import encode_picture, name_model, render_page, resize_picture
from vit.explanation.training_photos import Neighbour, TrainingPhotos
from vit.model.find_file import find_model
from vit.prediction.predictor import Pixels
from vit.runtime.metrics_file import METRICS_FILE, load_metrics
from vit.runtime.numbers import format_interval, format_number, format_percent
from vit.runtime.products import find_product

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


class Section(NamedTuple):
    """A section that a product adds to the report: the product's "report section" returns it.

    Attributes:
        anchor: Its id in the page.
        title: Its name in the navigation.
        html: Its content, already escaped; empty: only the sentence is shown.
        sentence: One more sentence at the top of the report.
    """

    anchor: str
    title: str
    html: str
    sentence: str


class ShownMistake(NamedTuple):
    """A mistake as the page shows it.

    Attributes:
        path: Name of the image.
        text: The label and the prediction.
        picture: The image as a data address.
        contrast: Why it is wrong; None for a model without maps.
        neighbours: Nearest training photos.
    """

    path: str
    text: str
    picture: str
    contrast: Any
    neighbours: list[Neighbour]


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
    mistakes = choose_mistakes(scores, result.num_examples)
    shown, problem = _show_mistakes(result, mistakes)
    by_class: dict[int, list[ShownMistake]] = defaultdict(list)
    for mistake, drawn in zip(mistakes, shown, strict=True):
        by_class[mistake.place].append(drawn)
    sentences = describe_in_plain_words(evaluation, scores)
    build_section = find_product("report section")
    section: Section | None = build_section and build_section(result)
    if section is not None:
        sentences.append(section.sentence)
    labels = {"x_label": "probability", "y_label": "frequency"} if scores.is_multilabel else {}
    context = {
        "e": evaluation,
        "run": name_model(evaluation.model),
        "outputs": f"{len(names)} {'labels' if scores.is_multilabel else 'classes'}",
        "sentences": sentences,
        "warnings": evaluation.list_warnings(),
        "percent": partial(format_percent, count=evaluation.num_images),
        "interval": partial(format_interval, count=evaluation.num_images),
        "number": format_number,
        "classes": _choose_classes(evaluation),
        "thresholds": dict(zip(names, scores.thresholds.tolist(), strict=True)),
        "details": _choose_details(evaluation, scores, by_class),
        "names": names,
        "problem": problem if mistakes else "",
        "matrix": None if scores.is_multilabel else draw_confusion(scores, names),
        "reliability": build_reliability_chart(evaluation.reliability, **labels),
        "selective": None
        if scores.is_multilabel
        else build_selective_chart(scores.confidence, scores.correct),
        "history": _chart_history(load_history(evaluation.model)),
        "section": section,
        "training": _describe_training(result.bundle),
    }
    return render_page(_TEMPLATE, context)


def _show_mistakes(
    result: "EvaluationResult", mistakes: Sequence[Mistake]
) -> tuple[list[ShownMistake], str]:
    """Return mistakes as the page shows them, and why nothing explains them; empty if it does."""
    bundle, scores = result.bundle, result.scores
    names = bundle.class_names
    pixels: list[Pixels] = [
        result.images.read(mistake.index, mistake.index + 1)[0] for mistake in mistakes
    ]
    problem = _find_problem(result)
    contrasts: Sequence[Any] = [None] * len(mistakes)
    neighbours: Sequence[list[Neighbour]] = [[] for _ in mistakes]
    if mistakes and not problem:
        photos = TrainingPhotos(bundle, side=SIDE, splits=result.images.splits)
        if scores.is_multilabel:
            neighbours = photos.find(pixels, 2)
        else:
            classes = [(mistake.place, mistake.predicted) for mistake in mistakes]
            neighbours = photos.find_of_classes(pixels, classes)
        try:
            contrasts = draw_contrasts(bundle, mistakes, pixels)
        except ValueError as error:
            problem = str(error)
    shown = []
    # a mistake is shown also without an explanation
    rows = zip(mistakes, pixels, contrasts, neighbours, strict=True)
    for mistake, photo, contrast, nearest in rows:
        index, percent = mistake.index, partial(format_percent, count=len(scores))
        probability = percent(float(scores.probabilities[index, mistake.predicted]))
        if scores.is_multilabel:
            has = ", ".join(compress(names, scores.labels[index])) or "none"
            kind = "missed" if mistake.is_missed else "falsely found"
            text = f"{names[mistake.place]} {kind}, probability {probability}; labels: {has}"
        else:
            own = percent(float(scores.probabilities[index, mistake.place]))
            text = (
                f"{names[mistake.place]} {own}, predicted {names[mistake.predicted]} {probability}"
            )
        picture = encode_picture(resize_picture(Image.fromarray(photo)))
        shown.append(ShownMistake(result.images.ids[index], text, picture, contrast, nearest))
    return shown, problem


def _find_problem(result: "EvaluationResult") -> str:
    """Return why neither maps nor training photos can explain these predictions; empty if they
    can."""
    if result.evaluation.split == CROSS_VALIDATION:
        return "the model has seen these images, unlike the probes of the folds"
    return ""


def _choose_classes(evaluation: "Evaluation") -> list[ClassMetrics]:
    """Keep the classes with the lowest F1 if there are many. Those without images come last."""
    classes = evaluation.per_class
    if len(classes) <= _MAX_CLASSES:
        return classes
    worst_first = sorted(classes, key=lambda row: (row.f1 is None, row.f1 or 0))
    return worst_first[:_MAX_CLASSES]


def _choose_details(
    evaluation: "Evaluation", scores: Scores, mistakes: Mapping[int, list[ShownMistake]]
) -> list[ShownClass]:
    """Return the classes with curves or mistakes, the worst first."""
    rest = evaluation.one_against_rest
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
                scores.probabilities[:, place], scores.marks[:, place], row.thresholds[0]
            )
        if charts or mistakes.get(place):
            details.append(ShownClass(place, row, charts, mistakes.get(place, [])))
    return details


def describe_in_plain_words(evaluation: "Evaluation", scores: Scores) -> list[str]:
    """Return a sentence each on guessing, the worst class, whether the model can be trusted alone,
    and problems in the data; without those that are unknown."""
    failures = _describe_labels if scores.is_multilabel else _describe_failures
    sentences = [
        evaluation.describe_guessing(),
        failures(evaluation, scores),
        _describe_trust(evaluation),
        _describe_data(evaluation),
    ]
    return list(filter(None, sentences))


def _describe_failures(evaluation: "Evaluation", scores: Scores) -> str:
    confusions = count_confusions(scores.labels, scores.predicted, num_classes=scores.num_classes)
    if not confusions:
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
    most = confusions[0]
    if most.count > 1:
        names = [row.name for row in evaluation.per_class]
        total = sum(pair.count for pair in confusions)
        sentences.append(
            f"The most frequent error is {names[most.label]} predicted as {names[most.predicted]}:"
            f" {most.count} of {total} errors."
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


def load_history(model: str) -> list[dict[str, Any]]:
    """Return the epochs in the metrics file next to a model file; none without such a file."""
    # with a damaged file only the chart is missing
    with suppress(ValueError):
        if run := find_run(model):
            return load_metrics(run / METRICS_FILE)
    return []


def _chart_history(epochs: Sequence[Mapping[str, Any]]) -> list[str]:
    charts = []
    loss = {
        name: points
        for name, key in (("training", "train_loss"), ("validation", "val_loss"))
        if (points := _read_series(epochs, key))
    }
    if loss:
        charts.append(build_history_chart("Loss", loss, y_label="cross-entropy, nats"))
    for title, label, key in (
        ("Accuracy", "top-1", "val_top1"),
        ("Mean average precision", "mAP", "val_map"),
    ):
        if points := _read_series(epochs, key):
            curve = {"validation": points}
            charts.append(build_history_chart(title, curve, y_label=label, y_range=(0, 1)))
    return charts


def _read_series(epochs: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """Return (epoch, value) for each epoch that has a finite value."""
    return [
        (row["epoch"], row[key])
        for row in epochs
        if isinstance(row.get(key), int | float) and math.isfinite(row[key])
    ]


def _describe_training(bundle: Bundle) -> str:
    """Describe in words how the model was trained; empty if it isn't known."""
    train, model = bundle.config.get("train"), bundle.config.get("model", {})
    step = bundle.metadata.get("step")
    if not train or step is None:
        return ""
    start = "from random weights"
    if init := model.get("init"):
        start = f"from the weights {name_model(str(init))}"
    length = f"best model at step {step:,}, {train.get('batch_size')} images a step"
    if step == 0 and model.get("probe"):
        length = "linear probe only"
    return f"{start}, {length}, seed {train.get('seed')}"
