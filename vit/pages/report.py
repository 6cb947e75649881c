"""The report of an evaluation: one HTML file to read and click through, and a table for a README."""

import base64
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from vit.bundle import Bundle
from vit.evaluation.corruptions import CORRUPTIONS
from vit.evaluation.images import Images
from vit.evaluation.metrics import Ints, Scores, compute_confusion
from vit.evaluation.predictor import Pixels
from vit.evaluation.result import Evaluation, EvaluationResult, Example
from vit.explanation.explain import explain_images
from vit.explanation.render.overlay import ColourScale, blend, find_range
from vit.pages.charts import Chart, build_line_chart, build_reliability_chart
from vit.pages.page import render_page
from vit.training.run_directory import METRICS_FILE, load_metrics

_MOST_CLASSES = 40  # in the confusion matrix; of more, those with the most errors
_LISTED = 100  # images that a cell lists
_PICTURED = 24  # of these, at most so many with a picture
_THUMBNAIL = 64  # pixels
_THUMBNAIL_BYTES = 3_000_000  # of all cells, encoded: keeps the page below 10 MB
_PICTURE_SIDES = (160, 256)  # pixels: pictures of errors are brought between these
_MAPS_AT_ONCE = 16

# name, title, whether shown as per cent, description
_METRICS = (
    ("top1", "Top-1 accuracy", True, "the most probable class is the label"),
    ("top5", "Top-5 accuracy", True, "the label is among the five most probable classes"),
    ("macro_f1", "Macro F1", True, "mean over the classes of the harmonic mean of precision and recall"),
    (
        "macro_precision",
        "Macro precision",
        True,
        "mean over the classes: how much of what is found is right",
    ),
    ("macro_recall", "Macro recall", True, "mean over the classes: how much of what is there is found"),
    ("loss", "Loss", False, "mean cross-entropy of the logits, nats"),
    ("ece", "Calibration error", True, "mean distance of confidence from accuracy over 15 bins"),
    ("brier", "Brier score", False, "squared distance of the probabilities from the truth, 0 to 2"),
    ("nll", "Negative log-likelihood", False, "mean surprise at the label, nats"),
)

Explain = Callable[[Sequence[Pixels]], list[Image.Image]]


@dataclass(frozen=True)
class _Cell:
    """The images of one true and one predicted class, the most confident first."""

    row: int  # positions among the classes shown
    column: int
    images: Ints


def build_report(
    result: EvaluationResult,
    *,
    history: Sequence[dict[str, Any]] | None = None,
    explain: Explain | None = None,
) -> str:
    """The page as text.

    `history` are the epochs of the training run (by default of the metrics file beside the model). `explain` draws
    a map over each picture (by default attention rollout), and may raise ValueError where a model has none.
    """
    evaluation, scores, images = result.evaluation, result.scores, result.images
    names = [each.name for each in evaluation.per_class]
    confusion = compute_confusion(scores)
    shown = _choose_classes(confusion)
    cells = list(_collect_cells(scores, shown))
    examples, maps_missing = _draw_examples(
        evaluation, images, explain or (lambda pictures: draw_maps(result.bundle, pictures))
    )
    context = {
        "evaluation": evaluation,
        "warnings": evaluation.list_warnings(),
        "metrics": _list_metrics(evaluation),
        "history": _chart_history(load_history(result.bundle.name) if history is None else history),
        "matrix": {
            "names": [names[index] for index in shown],
            "counts": confusion[np.ix_(shown, shown)].tolist(),
            "support": confusion.sum(axis=1)[shown].tolist(),
            "num_classes": len(names),
            "orders": _order_classes(confusion[np.ix_(shown, shown)], [names[index] for index in shown]),
        },
        "cells": _describe_cells(cells, scores, images),
        "pairs": _list_confused_pairs(confusion, names),
        "reliability": build_reliability_chart(
            [(each.lower, each.upper, each.accuracy, each.count) for each in evaluation.reliability]
        ),
        "examples": examples,
        "maps_missing": maps_missing,
        "families": _chart_families(evaluation),
        "sweeps": _chart_sweeps(evaluation),
    }
    return render_page("report.html.jinja", context)


def render_markdown(result: EvaluationResult) -> str:
    """The metrics as a table."""
    evaluation = result.evaluation
    lines = ["| metric | value | 95 % interval |", "|---|---:|---:|"]
    lines += [
        f"| {each['title']} | {each['value']} | {each['interval']} |" for each in _list_metrics(evaluation)
    ]
    if evaluation.mean_corruption_error is not None:
        lines.append(f"| Mean corruption error | {evaluation.mean_corruption_error:.1%} | |")
    lines += [
        "",
        f"{evaluation.num_images:,} images of {evaluation.data} ({evaluation.split}, fingerprint "
        f"{evaluation.fingerprint[:12]}); model {evaluation.model_sha256[:12]}, "
        f"{evaluation.conditions['precision']} on {evaluation.conditions['device']}.",
    ]
    lines += [f"- {warning}" for warning in evaluation.list_warnings()]
    return "\n".join(lines) + "\n"


# what `EvaluationResult.save` writes beside its own files
PAGES = {"evaluation.md": render_markdown, "report.html": build_report}


def load_history(model: str) -> list[dict[str, Any]]:
    """The rows of the metrics file beside a model file; none where there is no such file."""
    folder = Path(model) if Path(model).is_dir() else Path(model).parent
    return [] if model.startswith("timm:") else load_metrics(folder / METRICS_FILE)


def draw_maps(bundle: Bundle, pictures: Sequence[Pixels]) -> list[Image.Image]:
    """Attention rollout laid over pictures as the model sees them, [H, W, 3]."""
    # the pictures are already cut to the model's input
    whole = replace(bundle, preprocess=replace(bundle.preprocess, crop_pct=1.0))
    drawn = []
    for start in range(0, len(pictures), _MAPS_AT_ONCE):
        batch = [Image.fromarray(picture) for picture in pictures[start : start + _MAPS_AT_ONCE]]
        maps = explain_images(whole, batch).maps.cpu().numpy()
        for picture, values in zip(batch, maps, strict=True):
            photo = _resize(picture)
            low, high = find_range([values], signed=False)
            scale = ColourScale(low, high, signed=False, label="this image")
            geometry = whole.preprocess.geometry(picture.size)
            drawn.append(blend(photo, values, geometry, scale=scale))
    return drawn


# --- figures and charts ------------------------------------------------------------------------------------


def _list_metrics(evaluation: Evaluation) -> list[dict[str, str]]:
    rows = []
    for name, title, share, about in _METRICS:
        low, high = evaluation.intervals[name]
        if share:
            value = f"{100 * getattr(evaluation, name):.2f} %"
            interval = f"{100 * low:.2f} … {100 * high:.2f}"
        else:
            value, interval = f"{getattr(evaluation, name):.4f}", f"{low:.4f} … {high:.4f}"
        rows.append({"title": title, "value": value, "interval": interval, "about": about})
    return rows


def _chart_history(rows: Sequence[dict[str, Any]]) -> list[Chart]:
    def series(key: str) -> list[tuple[float, float]]:
        return [
            (float(row["epoch"]), float(row[key]))
            for row in rows
            if isinstance(row.get(key), int | float) and math.isfinite(row[key]) and "epoch" in row
        ]

    losses = {name: series(key) for name, key in (("training", "train_loss"), ("validation", "val_loss"))}
    losses = {name: points for name, points in losses.items() if points}
    charts = []
    if losses:
        charts.append(build_line_chart("Loss", losses, x_label="epoch", y_label="cross-entropy, nats"))
    if series("val_top1"):
        accuracy = {"validation": series("val_top1")}
        charts.append(build_line_chart("Accuracy", accuracy, x_label="epoch", y_label="top-1"))
    return charts


def _chart_families(evaluation: Evaluation) -> Chart | None:
    """Mean top-1 of each family of corruptions by severity; 0 is the clean images."""
    if evaluation.corruptions is None:
        return None
    families: dict[str, list[list[float]]] = {}
    for name, values in evaluation.corruptions.items():
        families.setdefault(CORRUPTIONS[name].family, []).append(values)
    series = {
        family: [(0.0, evaluation.top1), *enumerate(np.mean(values, axis=0).tolist(), start=1)]
        for family, values in families.items()
    }
    return build_line_chart("Corruptions", series, x_label="severity", y_label="top-1", y_range=(0, 1))


def _chart_sweeps(evaluation: Evaluation) -> list[Chart]:
    sweeps = evaluation.sweeps or {}
    moved = {name.removeprefix("shift_"): sweep for name, sweep in sweeps.items() if name != "rotate"}
    charts = []
    if moved:
        label = "share of the side"
        charts.append(build_line_chart("Shifts", moved, x_label=label, y_label="top-1", y_range=(0, 1)))
    if "rotate" in sweeps:
        turned = {"anticlockwise": sweeps["rotate"]}
        charts.append(
            build_line_chart("Rotations", turned, x_label="degrees", y_label="top-1", y_range=(0, 1))
        )
    return charts


# --- the confusion matrix ----------------------------------------------------------------------------------


def _choose_classes(confusion: Ints) -> list[int]:
    """All classes, or where they are too many to show those with the most errors."""
    if len(confusion) <= _MOST_CLASSES:
        return list(range(len(confusion)))
    errors = confusion.sum(axis=0) + confusion.sum(axis=1) - 2 * confusion.diagonal()
    return sorted(np.argsort(-errors, kind="stable")[:_MOST_CLASSES].tolist())


def _order_classes(counts: Ints, names: Sequence[str]) -> dict[str, list[int]]:
    """Orders of the classes, by what they are called in the page."""
    support = np.maximum(counts.sum(axis=1), 1)
    shares = counts / support[:, None]
    orders = {
        "the model's order": np.arange(len(counts)),
        "name": np.array(sorted(range(len(names)), key=lambda index: names[index])),
        "worst recall first": np.argsort(shares.diagonal(), kind="stable"),
        "most images first": np.argsort(-counts.sum(axis=1), kind="stable"),
    }
    if len(counts) > 2:
        # classes that are taken for one another side by side
        distance = 1 - (shares + shares.T) / 2
        np.fill_diagonal(distance, 0)
        tree = linkage(squareform(distance, checks=False), "average", optimal_ordering=True)
        orders["confused classes together"] = leaves_list(tree)
    return {name: order.tolist() for name, order in orders.items()}


def _list_confused_pairs(confusion: Ints, names: Sequence[str]) -> list[dict[str, Any]]:
    """The ten most frequent errors."""
    off = confusion.copy()
    np.fill_diagonal(off, 0)
    largest = np.argsort(-off, axis=None, kind="stable")[:10]
    places = [divmod(index, len(off)) for index in largest.tolist()]
    return [
        {"label": names[row], "predicted": names[column], "count": int(off[row, column])}
        for row, column in places
        if off[row, column]
    ]


def _collect_cells(scores: Scores, shown: Sequence[int]) -> Iterator[_Cell]:
    position = np.full(scores.num_classes, -1)
    position[list(shown)] = np.arange(len(shown))
    rows, columns = position[scores.labels], position[scores.predicted]
    key = np.where((rows < 0) | (columns < 0), -1, rows * len(shown) + columns)
    order = np.lexsort((-scores.confidence, key))
    starts = np.flatnonzero(np.diff(key[order], prepend=-2))
    for members in np.split(order, starts[1:]):
        if key[members[0]] >= 0:
            row, column = divmod(int(key[members[0]]), len(shown))
            yield _Cell(row, column, members)


def _describe_cells(cells: Sequence[_Cell], scores: Scores, images: Images) -> dict[str, list[list[Any]]]:
    """ "row,column" → [path, confidence, picture or null] of the first images of each cell.

    The cells take turns, so that each has some pictures when they can't all have as many.
    """
    pictures: dict[int, str] = {}
    room = _THUMBNAIL_BYTES
    for turn in range(_PICTURED):
        # errors first: they are what one looks for
        for cell in sorted(cells, key=lambda cell: cell.row == cell.column):
            if turn < len(cell.images) and room > 0:
                index = int(cell.images[turn])
                pictures[index] = _encode_thumbnail(images.read(index, index + 1)[0])
                room -= len(pictures[index])
    return {
        f"{cell.row},{cell.column}": [
            [images.ids[index], round(float(scores.confidence[index]), 4), pictures.get(index)]
            for index in cell.images[:_LISTED].tolist()
        ]
        for cell in cells
    }


# --- pictures ----------------------------------------------------------------------------------------------


def _draw_examples(
    evaluation: Evaluation, images: Images, explain: Explain
) -> tuple[dict[str, list[dict[str, Any]]], str | None]:
    """The examples with their pictures and maps, and why there are no maps."""
    position = {name: index for index, name in enumerate(images.ids)}
    groups = {
        "confident_mistakes": evaluation.examples.confident_mistakes,
        "uncertain_hits": evaluation.examples.uncertain_hits,
        "label_errors": evaluation.examples.label_errors,
    }
    paths = list(dict.fromkeys(example.path for group in groups.values() for example in group))
    pixels = {path: images.read(position[path], position[path] + 1)[0] for path in paths}
    missing = None
    maps: list[Image.Image] = []
    try:
        maps = explain(list(pixels.values()))
    except ValueError as error:
        missing = str(error)
    drawn = {path: _encode(picture, "JPEG") for path, picture in zip(paths, maps, strict=False)}

    def describe(example: Example) -> dict[str, Any]:
        photo = _encode(_resize(Image.fromarray(pixels[example.path])), "JPEG")
        return {"example": example, "picture": photo, "map": drawn.get(example.path)}

    return {name: [describe(example) for example in group] for name, group in groups.items()}, missing


def _resize(picture: Image.Image) -> Image.Image:
    smallest, largest = _PICTURE_SIDES
    side = min(max(max(picture.size), smallest), largest)
    scale = side / max(picture.size)
    size = (max(round(picture.width * scale), 1), max(round(picture.height * scale), 1))
    return picture.resize(size, Image.Resampling.LANCZOS)


def _encode_thumbnail(pixels: Pixels) -> str:
    picture = Image.fromarray(pixels)
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
    return _encode(picture, "WEBP")


def _encode(picture: Image.Image, kind: str) -> str:
    """A picture as a data address."""
    file = io.BytesIO()
    picture.save(file, format=kind, quality=80)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(file.getvalue()).decode()
