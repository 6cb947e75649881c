"""The report of an evaluation on images with several labels: one self-contained HTML file."""

from collections import defaultdict
from functools import partial
from itertools import compress, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vit.evaluation.label_metrics import LabelMetrics, LabelScores
from vit.evaluation.metrics import bin_confidence
from vit.evaluation.report.charts import Chart, build_curve_charts, build_reliability_chart
from vit.evaluation.report.report import (
    DrawnMap,
    build_context,
    describe_maps,
    draw_examples,
)
from vit.explanation.render.page import render_page
from vit.explanation.targets import LABEL
from vit.prediction.probabilities import Bools
from vit.runtime.machine import read_work_clock
from vit.runtime.numbers import format_percent

if TYPE_CHECKING:
    # A result writes its own report.
    from vit.evaluation.label_result import LabelEvaluation, LabelEvaluationResult
    from vit.evaluation.result import MetricRow

_TEMPLATE = Path(__file__).with_name("label_report.html.jinja")
# labels with curves and examples, the lowest average precision first; more make a large page
_MAX_FOLDED = 40
_MAX_PAIRS = 10


class Mistake(NamedTuple):
    """An image of which a label is missed or falsely found.

    Attributes:
        path: Name of the image.
        probability: Probability of the label.
        labels: Labels that the image has.
        picture: The image as a data address.
        map: Map of the label over it; None if there was no time for it.
    """

    path: str
    probability: float
    labels: list[str]
    picture: str
    map: DrawnMap | None


class FoldedLabel(NamedTuple):
    """The curves and the examples of a label, folded below the table."""

    place: int
    metrics: LabelMetrics
    charts: list[Chart]
    num_missed: int
    missed: list[Mistake]
    num_false: int
    false: list[Mistake]


class ErrorPair(NamedTuple):
    """Images of which one label is missed and another falsely found.

    Attributes:
        missed, found: Names of the labels.
        images: Number of images.
        chance: Expected number if the other label were found as often as in all images without it.
    """

    missed: str
    found: str
    images: int
    chance: float


def build_label_report(result: "LabelEvaluationResult") -> str:
    """Build the page: HTML that needs no other file. Its maps take about as much work as the
    evaluation at most."""
    deadline = read_work_clock(result.bundle.device.type) + result.seconds
    evaluation, scores = result.evaluation, result.scores
    labels, about_maps, maps_missing = _fold_labels(result, deadline)
    pairs = find_error_pairs(scores, result.bundle.class_names)
    context = {
        **build_context(result),
        "outputs": f"{len(evaluation.per_label)} labels",
        "sentences": _describe_in_plain_words(evaluation, scores, pairs),
        "cards": _choose_cards(evaluation, scores),
        "thresholds": np.broadcast_to(scores.thresholds, len(evaluation.per_label)).tolist(),
        "labels": labels,
        "pairs": pairs,
        "about_maps": about_maps,
        "maps_missing": maps_missing,
        "reliability": build_reliability_chart(
            bin_confidence(scores.probabilities.ravel(), scores.labels.ravel()),
            x_label="probability",
            y_label="frequency",
        ),
    }
    return render_page(_TEMPLATE, context)


def _choose_cards(
    evaluation: "LabelEvaluation", scores: LabelScores
) -> list[tuple["MetricRow", str]]:
    """Return the three metrics that most readers need, each with a remark."""
    rows = dict(zip((*evaluation.intervals, "ece"), evaluation.list_rows(), strict=False))
    percent = partial(format_percent, count=evaluation.num_images)
    sure = (
        f"mean probability {percent(float(scores.probabilities.mean()))},"
        f" labels that are there {percent(float(scores.labels.mean()))}"
    )
    exact = f"all labels right: {rows['exact_match'].value} of the images"
    return [(rows["map"], "all labels count alike"), (rows["macro_f1"], exact), (rows["ece"], sure)]


def _describe_in_plain_words(
    evaluation: "LabelEvaluation", scores: LabelScores, pairs: list[ErrorPair]
) -> list[str]:
    """Return a sentence each on guessing, the worst label, and errors together."""
    sentences = [evaluation.describe_guessing()]
    known = [row for row in evaluation.per_label if row.average_precision is not None]
    if len(known) > 1:
        worst = min(known, key=lambda row: row.average_precision or 0.0)
        hits = round((worst.recall or 0) * worst.support)
        sentences.append(
            f"It is worst on {worst.name}: {hits} of {worst.support} images that have it are found,"
            f" and {worst.predicted - hits} others."
        )
    missed = int((scores.labels & ~scores.predicted).sum())
    false = int((scores.predicted & ~scores.labels).sum())
    sentences.append(
        f"Of {int(scores.labels.sum()):,} labels {missed:,} are missed; {false:,} are falsely found."
    )
    if pairs:
        pair = pairs[0]
        sentences[-1] += (
            f" Where {pair.missed} is missed, {pair.found} is falsely found most often:"
            f" {pair.images} images."
        )
    return sentences


def find_error_pairs(
    scores: LabelScores, class_names: tuple[str, ...] | list[str]
) -> list[ErrorPair]:
    """Return the pairs of labels of which one is missed and the other falsely found in the same
    image, at least twice and more often than by chance; the most frequent first.

    Args:
        scores: Scores of the images.
        class_names: Name of each label.
    """
    missed = (scores.labels & ~scores.predicted).astype(np.float64)
    false = (scores.predicted & ~scores.labels).astype(np.float64)
    lacking = (~scores.labels).astype(np.float64)
    counts = missed.T @ false  # [missed, falsely found]
    rate = false.sum(axis=0) / np.maximum(lacking.sum(axis=0), 1)
    chance = (missed.T @ lacking) * rate
    is_pair = (counts >= 2) & (counts > chance)
    order = np.argsort(-np.where(is_pair, counts, 0), axis=None, kind="stable")
    return [
        ErrorPair(
            class_names[first],
            class_names[second],
            int(counts[first, second]),
            float(chance[first, second]),
        )
        for first, second in (divmod(int(place), len(counts)) for place in order[:_MAX_PAIRS])
        if is_pair[first, second]
    ]


def _fold_labels(
    result: "LabelEvaluationResult", deadline: float
) -> tuple[list[FoldedLabel], str, str]:
    """Choose the examples of each label and draw them with their maps.

    Returns:
        The labels, the lowest average precision first; what the maps show; and why there are none.
    """
    scores, rows = result.scores, result.evaluation.per_label
    order = sorted(
        (place for place, row in enumerate(rows) if row.support or row.predicted),
        key=lambda place: (
            rows[place].average_precision is None,
            rows[place].average_precision or 0,
        ),
    )[:_MAX_FOLDED]
    is_missed, is_false = scores.labels & ~scores.predicted, scores.predicted & ~scores.labels
    # (rank, image, label)
    cases: list[tuple[int, int, int]] = []
    for place in order:
        probabilities = scores.probabilities[:, place]
        for is_error, ranks in (
            (is_missed[:, place], probabilities),
            (is_false[:, place], -probabilities),
        ):
            chosen = _choose(is_error, ranks, result.num_examples)
            cases += [(rank, index, place) for rank, index in enumerate(chosen)]
    # one example of each kind before the second, because there may be no time for every map
    cases.sort(key=lambda case: case[0])
    paths = [result.images.ids[index] for _, index, _ in cases]
    # without the type, no cases would give floats
    target = LABEL.with_classes(torch.tensor([place for *_, place in cases], dtype=torch.int64))
    pictures, drawn, missing = draw_examples(result, paths, deadline, target=target)
    about = describe_maps(drawn, len(cases), explained="the label") if drawn else ""

    missed: dict[int, list[Mistake]] = defaultdict(list)
    false: dict[int, list[Mistake]] = defaultdict(list)
    maps = drawn.maps if drawn else []
    for (_, index, place), path, picture, drawn_map in zip_longest(cases, paths, pictures, maps):
        probability = float(scores.probabilities[index, place])
        labels = list(compress(result.bundle.class_names, scores.labels[index]))
        mistakes = missed if scores.labels[index, place] else false
        mistakes[place].append(Mistake(path, probability, labels, picture, drawn_map))
    folded = [
        FoldedLabel(
            place,
            rows[place],
            build_curve_charts(
                scores.probabilities[:, place],
                scores.labels[:, place],
                next(iter(rows[place].thresholds), None),
            ),
            int(is_missed[:, place].sum()),
            missed[place],
            int(is_false[:, place].sum()),
            false[place],
        )
        for place in order
    ]
    return folded, about, missing


def _choose(is_error: Bools, ranks: np.ndarray, count: int) -> list[int]:
    """Return the indices of the `count` clearest errors, those of the lowest ranks."""
    order = np.argsort(np.where(is_error, ranks, np.inf), kind="stable")
    chosen: list[int] = order[: min(int(is_error.sum()), count)].tolist()
    return chosen
