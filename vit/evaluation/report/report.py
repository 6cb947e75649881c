"""The report of an evaluation: one self-contained HTML file, and a table in Markdown."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from vit.bundle import Bundle
from vit.evaluation.per_class import ClassMetrics
from vit.evaluation.report.charts import (
    Chart,
    build_history_chart,
    build_reliability_chart,
    build_selective_chart,
)
from vit.evaluation.report.confusion import describe_confusion
from vit.evaluation.report.contrast import explain_confusions
from vit.evaluation.report.plain import describe_in_plain_words
from vit.evaluation.report.section import Section, find_run
from vit.evaluation.result import EvaluationResult
from vit.evaluation.schema import Evaluation
from vit.explanation.explainer import Explainer
from vit.explanation.items import items_from_images
from vit.explanation.render.overlay import blend
from vit.explanation.render.page import encode_picture, name_model, render_page, resize_picture
from vit.explanation.training_photos import TrainingPhotos
from vit.options import ExplainOptions
from vit.prediction.predictor import Pixels
from vit.runtime.metrics_file import METRICS_FILE, load_metrics
from vit.runtime.products import find_product

_TEMPLATES = Path(__file__).parent
_PER_CENT = ("top1", "top5", "macro_f1", "macro_precision", "macro_recall", "ece")
# in the table: a page of 20,000 would have 6 MB of them
_MAX_CLASSES = 1000
# training photos beside an error
_NUM_NEIGHBOURS = 3
_NEIGHBOUR_SIDE = 128


def render_pages(result: EvaluationResult) -> Mapping[str, str]:
    """What `EvaluationResult.save` writes beside its own files, by file name."""
    return {"evaluation.md": render_markdown(result), "report.html": build_report(result)}


def build_report(result: EvaluationResult) -> str:
    """Build the page: HTML that needs no other file."""
    evaluation = result.evaluation
    class_names = [row.name for row in evaluation.per_class]
    pictures, maps, maps_missing = _draw_examples(result)
    # listed and drawn once for both
    training_photos = TrainingPhotos(
        result.bundle, side=_NEIGHBOUR_SIDE, splits=result.images.splits
    )
    contrasts, _ = explain_confusions(result, training_photos)
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
        "metrics": _list_metrics(evaluation),
        "history": _chart_history(load_history(evaluation.model)),
        "section": section,
        "matrix": describe_confusion(result.scores, class_names, result.images),
        "contrasts": contrasts,
        "class_names": class_names,
        "reliability": build_reliability_chart(evaluation.reliability),
        "selective": build_selective_chart(result.scores.confidence, result.scores.correct),
        "pictures": pictures,
        "maps": maps,
        "maps_missing": maps_missing,
        "neighbours": dict(zip(errors, nearest, strict=True)),
    }
    return render_page(_TEMPLATES / "report.html.jinja", context)


def render_markdown(result: EvaluationResult) -> str:
    """The metrics as a table."""
    metrics = _list_metrics(result.evaluation)
    return render_page(
        _TEMPLATES / "evaluation.md.jinja", {"e": result.evaluation, "metrics": metrics}
    )


def load_history(model: str) -> list[dict[str, Any]]:
    """The epochs in the metrics file beside a model file; none where there is no such file."""
    run = find_run(model)
    # a damaged file costs the chart, not the evaluation
    with suppress(ValueError):
        return load_metrics(run / METRICS_FILE) if run else []
    return []


class DrawnMap(NamedTuple):
    """A map over its picture, and what its sanity check says."""

    overlay: Image.Image
    verdict: str


def draw_maps(bundle: Bundle, pictures: Sequence[Pixels]) -> list[DrawnMap]:
    """Attention rollout laid over pictures as the model sees them, [H, W, 3]."""
    if not pictures:
        return []
    # the pictures are already cut to the model's input
    uncropped = replace(bundle, preprocess=replace(bundle.preprocess, crop_pct=1.0))
    photos = [Image.fromarray(picture) for picture in pictures]
    options = ExplainOptions(methods=("rollout",), sanity_checks=True, batch_size=16)
    explanations = Explainer(uncropped, options).explain(items_from_images(photos))
    drawn = []
    for photo, explained in zip(photos, explanations.images, strict=True):
        (map,) = explained.maps
        assert map.scale is not None
        assert map.sanity_check is not None
        shown = resize_picture(photo)
        overlay = blend(shown, map.shown_values, explained.geometry, scale=map.scale)
        drawn.append(DrawnMap(overlay, map.sanity_check.verdict))
    return drawn


def _choose_classes(evaluation: Evaluation) -> list[ClassMetrics]:
    """Of many classes those with the lowest F1; of no use are those that occur nowhere."""
    classes = evaluation.per_class
    if len(classes) <= _MAX_CLASSES:
        return classes
    worst_first = sorted(classes, key=lambda row: (row.support + row.predicted == 0, row.f1))
    return worst_first[:_MAX_CLASSES]


def _list_metrics(evaluation: Evaluation) -> list[dict[str, str | None]]:
    metrics = []
    for name in evaluation.list_metrics():
        is_per_cent = name in _PER_CENT
        value, low, high = (
            f"{100 * number:.2f}" if is_per_cent else f"{number:.4f}"
            for number in (getattr(evaluation, name), *evaluation.intervals[name])
        )
        metrics.append(
            {
                "title": Evaluation.model_fields[name].title,
                "value": f"{value} %" if is_per_cent else value,
                "interval": f"{low} … {high}",
                "about": Evaluation.model_fields[name].description,
            }
        )
    return metrics


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
    """The finite values by epoch; an epoch without validation has none."""
    return [
        (row["epoch"], row[key])
        for row in epochs
        if "epoch" in row and isinstance(row.get(key), int | float) and math.isfinite(row[key])
    ]


def _draw_examples(
    result: EvaluationResult,
) -> tuple[dict[str, str], dict[str, tuple[str, str]], str | None]:
    """The pictures of the examples, and their attention maps with what their sanity checks say, by
    path; and why there are no maps."""
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
        drawn = draw_maps(result.bundle, pixels)
    except ValueError as error:
        return pictures, {}, str(error)
    maps = [(encode_picture(overlay), verdict) for overlay, verdict in drawn]
    return pictures, dict(zip(paths, maps, strict=True)), None


def _read_images(result: EvaluationResult, paths: Iterable[str]) -> list[Pixels]:
    """Evaluated images as the model sees them."""
    position = {name: index for index, name in enumerate(result.images.ids)}
    return [result.images.read(position[path], position[path] + 1)[0] for path in paths]
