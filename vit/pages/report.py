"""The report of an evaluation: one self-contained HTML file, and a table in Markdown."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vit.bundle import Bundle
from vit.evaluation.corruptions import CORRUPTIONS
from vit.evaluation.evaluate import EvaluationResult
from vit.evaluation.metrics import ClassMetrics
from vit.evaluation.predictor import Pixels
from vit.evaluation.schema import Evaluation
from vit.explanation.explain import explain_images
from vit.explanation.render.overlay import ColourScale, blend, find_range
from vit.pages.charts import Chart, build_line_chart, build_reliability_chart
from vit.pages.confusion import describe_confusion
from vit.pages.page import encode_picture, name_model, render_page, resize_picture
from vit.training.run_directory import METRICS_FILE, load_metrics

_PER_CENT = ("top1", "top5", "macro_f1", "macro_precision", "macro_recall", "ece")
_MOST_CLASSES = 1000  # in the table: a page of 20,000 would have 6 MB of them

Explain = Callable[[Sequence[Pixels]], list[Image.Image]]


def build_report(
    result: EvaluationResult, *, history: Sequence[dict[str, Any]] | None = None, explain: Explain | None = None
) -> str:
    """The page as text.

    `history` are the epochs of the training run (by default of the metrics file beside the model). `explain` draws a
    map over each picture (by default attention rollout), and may raise ValueError where a model has none.
    """
    evaluation = result.evaluation
    examples, maps_missing = _draw_examples(result, explain or (lambda pictures: draw_maps(result.bundle, pictures)))
    context = {
        "evaluation": evaluation,
        "run": name_model(evaluation.model),
        "data": result.images.title or evaluation.data,
        "warnings": evaluation.list_warnings(),
        "classes": _choose_classes(evaluation),
        "metrics": _list_metrics(evaluation),
        "history": _chart_history(load_history(result.bundle.name) if history is None else history),
        "matrix": describe_confusion(result.scores, [each.name for each in evaluation.per_class], result.images),
        "reliability": build_reliability_chart(evaluation.reliability),
        "examples": examples,
        "maps_missing": maps_missing,
        "families": _chart_families(evaluation),
        "sweeps": _chart_sweeps(evaluation),
    }
    return render_page("report.html.jinja", context)


def render_markdown(result: EvaluationResult) -> str:
    """The metrics as a table."""
    return render_page("evaluation.md.jinja", {"e": result.evaluation, "metrics": _list_metrics(result.evaluation)})


# what `EvaluationResult.save` writes beside its own files
PAGES = {"evaluation.md": render_markdown, "report.html": build_report}


def load_history(model: str) -> list[dict[str, Any]]:
    """The epochs in the metrics file beside a model file; none where there is no such file."""
    folder = Path(model) if Path(model).is_dir() else Path(model).parent
    with suppress(ValueError):  # a damaged file costs the chart, not the evaluation
        return [] if model.startswith("timm:") else load_metrics(folder / METRICS_FILE)
    return []


def draw_maps(bundle: Bundle, pictures: Sequence[Pixels]) -> list[Image.Image]:
    """Attention rollout laid over pictures as the model sees them, [H, W, 3]."""
    if not pictures:
        return []
    # the pictures are already cut to the model's input
    whole = replace(bundle, preprocess=replace(bundle.preprocess, crop_pct=1.0))
    photos = [Image.fromarray(picture) for picture in pictures]
    drawn = []
    for photo, values in zip(photos, explain_images(whole, photos, batch_size=16).maps.cpu().numpy(), strict=True):
        scale = ColourScale(*find_range([values], signed=False), signed=False, label="this image")
        drawn.append(blend(resize_picture(photo), values, whole.preprocess.geometry(photo.size), scale=scale))
    return drawn


def _choose_classes(evaluation: Evaluation) -> list[ClassMetrics]:
    """Of many classes those with the lowest F1; of no use are those that occur nowhere."""
    classes = evaluation.per_class
    if len(classes) <= _MOST_CLASSES:
        return classes
    return sorted(classes, key=lambda each: (each.support + each.predicted == 0, each.f1))[:_MOST_CLASSES]


def _list_metrics(evaluation: Evaluation) -> list[dict[str, str]]:
    listed = []
    for name in evaluation.list_metrics():
        field, numbers = Evaluation.model_fields[name], (getattr(evaluation, name), *evaluation.intervals[name])
        value, low, high = (f"{100 * each:.2f}" if name in _PER_CENT else f"{each:.4f}" for each in numbers)
        texts = (field.title, value + " %" * (name in _PER_CENT), f"{low} … {high}", field.description)
        listed.append(dict(zip(("title", "value", "interval", "about"), map(str, texts), strict=True)))
    return listed


def _chart_history(epochs: Sequence[dict[str, Any]]) -> list[Chart]:
    def series(**keys: str) -> dict[str, list[tuple[float, float]]]:
        found = {}
        for name, key in keys.items():
            rows = [row for row in epochs if isinstance(row.get(key), int | float) and "epoch" in row]
            found[name] = [(float(row["epoch"]), float(row[key])) for row in rows if math.isfinite(row[key])]
        return {name: points for name, points in found.items() if points}

    charts = (
        ("Loss", series(training="train_loss", validation="val_loss"), "cross-entropy, nats"),
        ("Accuracy", series(validation="val_top1"), "top-1"),
    )
    return [build_line_chart(title, lines, x_label="epoch", y_label=label) for title, lines, label in charts if lines]


def _chart_families(evaluation: Evaluation) -> Chart | None:
    """Mean top-1 of each family of corruptions by severity; 0 is the clean images."""
    if evaluation.corruptions is None:
        return None
    families: dict[str, list[list[float]]] = {}
    for name, values in evaluation.corruptions.items():
        families.setdefault(CORRUPTIONS[name].family, []).append(values)
    averaged = {family: np.mean(values, axis=0).tolist() for family, values in families.items()}
    series = {family: list(enumerate([evaluation.top1, *values])) for family, values in averaged.items()}
    return build_line_chart("Corruptions", series, x_label="severity", y_label="top-1", y_range=(0, 1))


def _chart_sweeps(evaluation: Evaluation) -> list[Chart]:
    sweeps = dict(evaluation.sweeps or {})
    rotations = {"anticlockwise": sweeps.pop("rotate")} if "rotate" in sweeps else {}
    shifts = {name.removeprefix("shift_"): sweep for name, sweep in sweeps.items()}
    charts = (("Shifts", shifts, "fraction of the side"), ("Rotations", rotations, "degrees"))
    return [
        build_line_chart(title, series, x_label=label, y_label="top-1", y_range=(0, 1))
        for title, series, label in charts
        if series
    ]


def _draw_examples(result: EvaluationResult, explain: Explain) -> tuple[dict[str, list[dict[str, Any]]], str | None]:
    """The examples with their pictures and maps, and why there are no maps."""
    found, images = result.evaluation.examples, result.images
    groups = {name: getattr(found, name) for name in ("confident_mistakes", "uncertain_hits", "label_errors")}
    position = {name: index for index, name in enumerate(images.ids)}
    paths = dict.fromkeys(example.path for group in groups.values() for example in group)
    pixels = {path: images.read(position[path], position[path] + 1)[0] for path in paths}
    maps, missing = {}, None
    try:
        drawn = explain(list(pixels.values()))
        maps = {path: encode_picture(each) for path, each in zip(pixels, drawn, strict=True)}
    except ValueError as error:
        missing = str(error)
    photos = {path: encode_picture(resize_picture(Image.fromarray(each))) for path, each in pixels.items()}
    described = {
        name: [{"example": each, "picture": photos[each.path], "map": maps.get(each.path)} for each in group]
        for name, group in groups.items()
    }
    return described, missing
