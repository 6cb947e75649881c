"""The report of an evaluation: one self-contained HTML file, and a table in Markdown."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from vit.bundle import Bundle
from vit.evaluation.metrics import ClassMetrics
from vit.evaluation.report.charts import (
    Chart,
    build_history_chart,
    build_reliability_chart,
    build_selective_chart,
)
from vit.evaluation.report.confusion import describe_confusion
from vit.evaluation.report.contrast import explain_confusions
from vit.evaluation.report.plain import describe_in_plain_words
from vit.explanation.explainer import Explainer
from vit.explanation.items import items_from_images
from vit.explanation.render.overlay import blend
from vit.explanation.render.page import encode_picture, name_model, render_page, resize_picture
from vit.explanation.training_photos import TrainingPhotos
from vit.prediction.conformal import describe_low_coverage
from vit.prediction.predictor import Pixels
from vit.runtime.metrics_file import METRICS_FILE, load_metrics
from vit.runtime.numbers import format_interval, format_number, format_percent
from vit.runtime.products import find_product

if TYPE_CHECKING:
    # A result writes its own report.
    from vit.evaluation.result import Evaluation, EvaluationResult

_TEMPLATES = Path(__file__).parent
# rows in the table of classes; 20,000 would make a page of 6 MB
_MAX_CLASSES = 1000
# training photos next to an error
_NUM_NEIGHBOURS = 3
_NEIGHBOUR_SIDE = 128


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


def build_report(result: "EvaluationResult") -> str:
    """Build the page: HTML that needs no other file."""
    evaluation = result.evaluation
    class_names = [row.name for row in evaluation.per_class]
    pictures, maps, maps_missing = _draw_examples(result)
    # listed and drawn once for both uses
    training_photos = TrainingPhotos(
        result.bundle, side=_NEIGHBOUR_SIDE, splits=result.images.splits
    )
    errors = [example.path for example in evaluation.examples.most_confident_errors]
    nearest = training_photos.find(_read_images(result, errors), _NUM_NEIGHBOURS)
    sentences = describe_in_plain_words(result)
    build_section = find_product("report section")
    section: Section | None = build_section(result) if build_section else None
    if section is not None:
        sentences.append(section.sentence)
    context = {
        "evaluation": evaluation,
        "run": name_model(evaluation.model),
        "data": result.images.title or evaluation.data,
        "sentences": sentences,
        "warnings": evaluation.list_warnings(),
        "classes": _choose_classes(evaluation),
        "metrics": evaluation.list_rows(),
        "percent": partial(format_percent, count=evaluation.num_images),
        "interval_text": partial(format_interval, count=evaluation.num_images),
        "number": format_number,
        "describe_low_coverage": describe_low_coverage,
        "history": _chart_history(load_history(evaluation.model)),
        "section": section,
        "matrix": describe_confusion(result.scores, class_names, result.images),
        "contrasts": explain_confusions(result, training_photos),
        "class_names": class_names,
        "reliability": build_reliability_chart(evaluation.reliability),
        "selective": build_selective_chart(result.scores.confidence, result.scores.correct),
        "pictures": pictures,
        "maps": maps,
        "maps_missing": maps_missing,
        "neighbours": dict(zip(errors, nearest, strict=True)),
    }
    return render_page(_TEMPLATES / "report.html.jinja", context)


def render_markdown(result: "EvaluationResult") -> str:
    """Return the metrics as a table in Markdown."""
    evaluation = result.evaluation
    percent = partial(format_percent, count=evaluation.num_images)
    return render_page(_TEMPLATES / "evaluation.md.jinja", {"e": evaluation, "percent": percent})


def find_run(model: str) -> Path | None:
    """Return the run that a model file lies in; None for a model without a file."""
    if model.startswith("timm:"):
        return None
    return Path(model) if Path(model).is_dir() else Path(model).parent


def load_history(model: str) -> list[dict[str, Any]]:
    """Return the epochs in the metrics file next to a model file; none without such a file."""
    run = find_run(model)
    # with a damaged file only the chart is missing
    with suppress(ValueError):
        return load_metrics(run / METRICS_FILE) if run else []
    return []


def draw_maps(bundle: Bundle, pictures: Sequence[Pixels]) -> list[tuple[str, str]]:
    """Draw attention rollout over pictures as the model sees them, [H, W, 3].

    Returns:
        For each picture the overlay as a data address, and the result of the map's sanity check.
    """
    if not pictures:
        return []
    # the pictures are already cut to the model's input
    uncropped = replace(bundle, preprocess=replace(bundle.preprocess, crop_pct=1.0))
    photos = [Image.fromarray(picture) for picture in pictures]
    explainer = Explainer(uncropped, ["rollout"], sanity_checks=True, batch_size=16)
    explanations = explainer.explain(items_from_images(photos))
    drawn = []
    for photo, explained in zip(photos, explanations.images, strict=True):
        (map,) = explained.maps
        assert map.scale is not None
        assert map.sanity_check is not None
        shown = resize_picture(photo)
        overlay = blend(shown, map.shown_values, explained.geometry, scale=map.scale)
        drawn.append((encode_picture(overlay), map.sanity_check.verdict))
    return drawn


def _choose_classes(evaluation: "Evaluation") -> list[ClassMetrics]:
    """Keep the classes with the lowest F1 if there are many. Those without images come last."""
    classes = evaluation.per_class
    if len(classes) <= _MAX_CLASSES:
        return classes
    worst_first = sorted(classes, key=lambda row: (row.f1 is None, row.f1 or 0))
    return worst_first[:_MAX_CLASSES]


def _chart_history(epochs: Sequence[Mapping[str, Any]]) -> list[Chart]:
    charts = []
    loss = {
        "training": _read_series(epochs, "train_loss"),
        "validation": _read_series(epochs, "val_loss"),
    }
    loss = {name: points for name, points in loss.items() if points}
    if loss:
        charts.append(build_history_chart("Loss", loss, y_label="cross-entropy, nats"))
    top1 = _read_series(epochs, "val_top1")
    if top1:
        charts.append(build_history_chart("Accuracy", {"validation": top1}, y_label="top-1"))
    return charts


def _read_series(epochs: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """Return (epoch, value) for each epoch that has a finite value."""
    return [
        (row["epoch"], row[key])
        for row in epochs
        if isinstance(row.get(key), int | float) and math.isfinite(row[key])
    ]


def _draw_examples(
    result: "EvaluationResult",
) -> tuple[dict[str, str], dict[str, tuple[str, str]], str | None]:
    """Draw the examples.

    Returns:
        Pictures by path; attention maps with the results of their sanity checks, by path; and why
        there are no maps.
    """
    examples = result.evaluation.examples
    groups = (
        examples.most_confident_errors,
        examples.least_confident_correct,
        examples.label_errors,
    )
    # an image may be in several groups
    paths = dict.fromkeys(example.path for group in groups for example in group)
    pixels = _read_images(result, paths)
    photos = [encode_picture(resize_picture(Image.fromarray(values))) for values in pixels]
    pictures = dict(zip(paths, photos, strict=True))
    try:
        maps = draw_maps(result.bundle, pixels)
    except ValueError as error:
        return pictures, {}, str(error)
    return pictures, dict(zip(paths, maps, strict=True)), None


def _read_images(result: "EvaluationResult", paths: Iterable[str]) -> list[Pixels]:
    """Return evaluated images as the model sees them."""
    position = {name: index for index, name in enumerate(result.images.ids)}
    return [result.images.read(position[path], position[path] + 1)[0] for path in paths]
