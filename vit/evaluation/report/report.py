"""The report of an evaluation: one self-contained HTML file."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from vit.bundle import Bundle
from vit.evaluation.images import EvaluationSet
from vit.evaluation.metrics import ClassMetrics
from vit.evaluation.out_of_fold import CROSS_VALIDATION
from vit.evaluation.report.charts import (
    Chart,
    build_curve_charts,
    build_history_chart,
    build_reliability_chart,
    build_selective_chart,
)
from vit.evaluation.report.confusion import describe_confusion
from vit.evaluation.report.contrast import explain_confusions, find_confused_pairs
from vit.evaluation.report.plain import describe_in_plain_words
from vit.explanation.capture.forward import open_reader
from vit.explanation.checks.sanity_checks import check_maps
from vit.explanation.explainer import choose_explain_batch_size
from vit.explanation.methods.auto import AUTO, choose_methods
from vit.explanation.methods.maps import compute_maps
from vit.explanation.methods.registry import METHODS, Method
from vit.explanation.render.page import (
    encode_map,
    encode_picture,
    name_model,
    render_page,
    resize_picture,
)
from vit.explanation.render.scale import PatchMap, fit_scale, relative_to_uniform
from vit.explanation.targets import CLASS, Target
from vit.explanation.training_photos import Neighbour, TrainingPhotos
from vit.model.find_file import find_model
from vit.prediction.ensemble import Ensemble
from vit.prediction.labels import compute_probabilities
from vit.prediction.predictor import Pixels
from vit.runtime.device import copy_to_device, copy_to_host
from vit.runtime.machine import read_work_clock
from vit.runtime.metrics_file import METRICS_FILE, load_metrics
from vit.runtime.numbers import format_interval, format_number, format_percent
from vit.runtime.products import find_product
from vit.runtime.progress import show_progress

if TYPE_CHECKING:
    # A result writes its own report.
    from vit.evaluation.label_result import LabelEvaluationResult
    from vit.evaluation.result import Evaluation, EvaluationResult, MetricRow

_TEMPLATES = Path(__file__).parent
# rows in the table of classes; 20,000 would make a page of 6 MB
_MAX_CLASSES = 1000
# training photos next to an error
_NUM_NEIGHBOURS = 3
_NEIGHBOUR_SIDE = 128
# seconds for explanations of confused classes
_MAX_CONTRAST_SECONDS = 15.0
# errors that are shown; the others are folded
_NUM_SHOWN = 6
# class and text of the badge of each verdict
_BADGES = {
    "confirmed": ("confirmed", "✓ map confirmed"),
    "partly confirmed": ("partly", "~ map partly confirmed"),
    "not confirmed": ("not", "✗ map not confirmed"),
    "not tested": ("untested", "– map not tested"),
}


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


class DrawnMap(NamedTuple):
    """A map over a picture.

    Attributes:
        picture: The overlay as a data address; None if the map is nearly even.
        verdict: Result of the patch-removal test; None if there was no time for it.
    """

    picture: str | None
    verdict: str | None


class DrawnMaps(NamedTuple):
    """Maps of one method over the first of several pictures."""

    method: Method
    maps: list[DrawnMap]


def build_report(result: "EvaluationResult") -> str:
    """Build the page: HTML that needs no other file. Its maps take about as much work as the
    evaluation at most."""
    deadline = read_work_clock(result.bundle.device.type) + result.seconds
    evaluation = result.evaluation
    class_names = [row.name for row in evaluation.per_class]
    # listed and drawn once for both uses
    training_photos = TrainingPhotos(
        result.bundle, side=_NEIGHBOUR_SIDE, splits=result.images.splits
    )
    errors = [example.path for example in evaluation.examples.most_confident_errors]
    problem = find_problem(result)
    nearest: list[list[Neighbour]] = [[] for _ in errors]
    contrasts = []
    if not problem:
        nearest = training_photos.find(read_images(result.images, errors), _NUM_NEIGHBOURS)
        contrasts = explain_confusions(
            result, training_photos, seconds=min(_MAX_CONTRAST_SECONDS, result.seconds / 3)
        )
    groups = (
        evaluation.examples.most_confident_errors,
        evaluation.examples.label_errors,
        evaluation.examples.least_confident_correct,
    )
    # an image may be in several groups
    paths = list(dict.fromkeys(example.path for group in groups for example in group))
    # explaining confusions has verified the model
    photos, drawn, maps_missing = draw_examples(result, paths, deadline, verify=not contrasts)
    sentences = describe_in_plain_words(result)
    build_section = find_product("report section")
    section: Section | None = build_section and build_section(result)
    if section is not None:
        sentences.append(section.sentence)
    context = {
        **build_context(result),
        "sentences": sentences,
        "classes": _choose_classes(evaluation),
        "outputs": f"{len(class_names)} classes",
        "cards": _choose_cards(result),
        "section": section,
        "matrix": describe_confusion(result.scores, class_names, result.images),
        "contrasts": contrasts,
        "num_pairs": len(find_confused_pairs(result.scores)),
        "class_names": class_names,
        "reliability": build_reliability_chart(evaluation.reliability),
        "selective": build_selective_chart(result.scores.confidence, result.scores.correct),
        "curves": _draw_curves(result),
        "pictures": dict(zip(paths, photos, strict=True)),
        "maps": dict(zip(paths, drawn.maps if drawn else [], strict=False)),
        "about_maps": describe_maps(drawn, len(paths)) if drawn else "",
        "maps_missing": maps_missing if paths else "",
        "num_shown": _NUM_SHOWN,
        "neighbours": dict(zip(errors, nearest, strict=True)),
    }
    return render_page(_TEMPLATES / "report.html.jinja", context)


def build_context(result: "EvaluationResult | LabelEvaluationResult") -> dict[str, Any]:
    """Return what the templates of both reports need."""
    evaluation = result.evaluation
    return {
        "evaluation": evaluation,
        "run": name_model(evaluation.model),
        "data": evaluation.data,
        "warnings": evaluation.list_warnings(),
        "metrics": evaluation.list_rows(),
        "beats_guessing": evaluation.beats_guessing(),
        "percent": partial(format_percent, count=evaluation.num_images),
        "interval_text": partial(format_interval, count=evaluation.num_images),
        "number": format_number,
        "history": _chart_history(load_history(evaluation.model)),
        "badges": _BADGES,
        "training": _describe_training(result.bundle),
    }


def _draw_curves(result: "EvaluationResult") -> list[Chart]:
    """Draw the curves of one class against the rest."""
    metrics = result.evaluation.against_rest
    if metrics is None or not metrics.thresholds:
        return []
    place = result.bundle.class_names.index(metrics.name)
    probabilities = compute_probabilities(result.bundle, result.logits)[:, place]
    return build_curve_charts(probabilities, result.scores.labels == place, metrics.thresholds[0])


def find_problem(result: "EvaluationResult | LabelEvaluationResult") -> str:
    """Return why neither maps nor training photos can explain these predictions; empty if they
    can."""
    if result.evaluation.split == CROSS_VALIDATION:
        return "the model has seen these images, unlike the probes of the folds"
    if isinstance(result.bundle, Ensemble):
        return "they are of one model, and these are predictions of several"
    return ""


def _choose_cards(result: "EvaluationResult") -> list[tuple["MetricRow", str]]:
    """Return the three metrics that most readers need, each with a remark: the accuracy, the mean
    over the classes, and the calibration error."""
    evaluation = result.evaluation
    # more rows follow those of the metrics
    rows = dict(zip(evaluation.list_metrics(), evaluation.list_rows(), strict=False))
    means = rows.get("macro_recall", rows["macro_f1"])
    confidence = float(result.scores.confidence.mean())
    percent = partial(format_percent, count=evaluation.num_images)
    sure = f"mean confidence {percent(confidence)}, correct {percent(evaluation.top1)}"
    return [(rows["top1"], ""), (means, "all classes count alike"), (rows["ece"], sure)]


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


def draw_maps(
    bundle: Bundle,
    pictures: Sequence[Pixels],
    deadline: float,
    *,
    target: Target = CLASS,
    verify: bool = True,
) -> DrawnMaps:
    """Draw maps over pictures as the model sees them, [H, W, 3].

    Maps are drawn until the deadline, at least of the first pictures. They are tested as long as
    there is time to draw the others afterwards.

    Args:
        bundle: The model.
        pictures: The pictures, the most important ones first.
        deadline: Time by `read_work_clock`.
        target: Target of the maps, for all the pictures.
        verify: See `compute_maps`.

    Raises:
        ValueError: The model has no map.
    """
    (method, *_) = choose_methods((AUTO,), bundle, num_images=len(pictures))
    reader = open_reader(bundle)
    num_at_once = choose_explain_batch_size(bundle.preprocess.image_size, bundle.device) // 16
    drawn: list[DrawnMap] = []
    clock = partial(read_work_clock, bundle.device.type)
    # seconds for a picture
    drawing = testing = 0.0
    with show_progress("drawing maps", len(pictures)) as advance:
        for first in range(0, len(pictures), num_at_once):
            start = clock()
            left = len(pictures) - first
            if drawn and start + drawing * num_at_once > deadline:
                break
            pixels = np.stack(pictures[first : first + num_at_once])
            batch = copy_to_device(torch.from_numpy(pixels), bundle.device)
            forward, classes, (maps,) = compute_maps(
                reader,
                bundle.preprocess.normalize(batch),
                methods=[method],
                target=target.select(range(first, first + len(pixels))),
                verify=verify and first == 0,
            )
            values = maps.values[:, 0].cpu().numpy()
            drawing = (clock() - start) / len(pixels)
            verdicts: list[str | None] = [None] * len(pixels)
            if start + drawing * left + testing * len(pixels) <= deadline:
                ((check,),) = check_maps(forward, classes, [maps], predicted_first=True)
                verdicts = [row.verdict for row in copy_to_host(check).to_list()]
                testing = (clock() - start) / len(pixels) - drawing
            for photo, map_values, verdict in zip(pixels, values, verdicts, strict=True):
                drawn.append(DrawnMap(_draw_map(photo, map_values, maps.method), verdict))
            advance(len(pixels))
    return DrawnMaps(METHODS[method], drawn)


def _draw_map(photo: Pixels, values: PatchMap, method: Method) -> str | None:
    """Draw a map over a photo; None if it is nearly even."""
    relative = relative_to_uniform(values)
    scale = fit_scale([relative], signed=method.signed)
    if scale.is_flat:
        return None
    picture = Image.fromarray(photo)
    return encode_map(picture, relative, scale=scale, side=max(resize_picture(picture).size))


def _choose_classes(evaluation: "Evaluation") -> list[ClassMetrics]:
    """Keep the classes with the lowest F1 if there are many. Those without images come last."""
    classes = evaluation.per_class
    if len(classes) <= _MAX_CLASSES:
        return classes
    worst_first = sorted(classes, key=lambda row: (row.f1 is None, row.f1 or 0))
    return worst_first[:_MAX_CLASSES]


def _chart_history(epochs: Sequence[Mapping[str, Any]]) -> list[Chart]:
    charts = []
    loss = {}
    for name, key in (("training", "train_loss"), ("validation", "val_loss")):
        if points := _read_series(epochs, key):
            loss[name] = points
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


def draw_examples(
    result: "EvaluationResult | LabelEvaluationResult",
    paths: Iterable[str],
    deadline: float,
    *,
    target: Target = CLASS,
    verify: bool = True,
) -> tuple[list[str], DrawnMaps | None, str]:
    """Draw evaluated images, with maps of the first of them.

    Args:
        result: The evaluation.
        paths: Names of the images, the most important ones first.
        deadline: Time by `read_work_clock`.
        target: See `draw_maps`.
        verify: See `compute_maps`.

    Returns:
        The pictures, as data addresses; the maps of the first of them; and why there are none.
    """
    pixels = read_images(result.images, paths)
    pictures = [encode_picture(resize_picture(Image.fromarray(values))) for values in pixels]
    drawn = None
    problem = find_problem(result)
    if pixels and not problem:
        try:
            drawn = draw_maps(result.bundle, pixels, deadline, target=target, verify=verify)
        except ValueError as error:
            problem = str(error)
    return pictures, drawn, problem


def describe_maps(
    drawn: DrawnMaps, num_pictures: int, *, explained: str = "the predicted class"
) -> str:
    """Describe what the maps show, which are not drawn, and that some are missing to save time."""
    method = drawn.method
    text = f"Next to a picture is its {method.title}, which is the same for every class."
    if method.class_specific:
        against = " and against it (blue)" if method.signed else ""
        text = f"Next to a picture is the evidence for {explained} (red){against}."
    verdicts = [map.verdict for map in drawn.maps if map.verdict]
    if verdicts:
        text += " Its badge is the result of the patch-removal test: does the prediction change"
        text += " without the patches that the map ranks first?"
    num_even = sum(map.picture is None for map in drawn.maps)
    if num_even:
        text += f" Maps that are nearly even are not drawn ({num_even})."
    if len(verdicts) < num_pictures:
        text += (
            f" Of {num_pictures} pictures, {len(drawn.maps)} have a map and {len(verdicts)} a tested"
            " one, so that they take no longer than the evaluation; vit explain tests all."
        )
    return text


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


def read_images(images: EvaluationSet, paths: Iterable[str]) -> list[Pixels]:
    """Return evaluated images as the model sees them."""
    position = {name: index for index, name in enumerate(images.ids)}
    return [images.read(position[path], position[path] + 1)[0] for path in paths]
