"""Findings of an evaluation in plain sentences, for readers who are not engineers."""

from typing import TYPE_CHECKING

from vit.evaluation.metrics import Scores, count_confusions
from vit.runtime.numbers import format_percent

if TYPE_CHECKING:
    # A result writes its own report.
    from vit.evaluation.result import Evaluation, EvaluationResult

# With fewer images of a class, its recall says little.
_MIN_SUPPORT = 5


def describe_in_plain_words(result: "EvaluationResult") -> list[str]:
    """Return a sentence each on guessing, the worst class, whether the model can be trusted alone,
    and problems in the data; without those that are unknown."""
    evaluation = result.evaluation
    sentences = [
        evaluation.describe_guessing(),
        _describe_failures(evaluation, result.scores),
        _describe_trust(evaluation),
        _describe_data(evaluation),
    ]
    return list(filter(None, sentences))


def _describe_failures(evaluation: "Evaluation", scores: Scores) -> str:
    # a class of a few images is the worst one by chance
    rows = [
        (row.recall, row.support, row.name)
        for row in evaluation.per_class
        if row.recall is not None and row.recall < 1 and row.support >= _MIN_SUPPORT
    ]
    confusions = count_confusions(scores.labels, scores.predicted, num_classes=scores.num_classes)
    if not confusions:
        return ""
    most = confusions[0]
    names = [row.name for row in evaluation.per_class]
    text = ""
    if rows:
        recall, support, name = min(rows, key=lambda row: row[0])
        text = f"It fails most on {name}: {round(recall * support)} of {support} images are recognised."
    if most.count > 1:
        text += (
            " " * bool(text) + f"The most frequent error is {names[most.label]} predicted as"
            f" {names[most.predicted]}: {most.count} of"
            f" {sum(pair.count for pair in confusions)} errors."
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
    count = evaluation.num_images
    return (
        f"It can decide {format_percent(row.single, count)} of the images alone,"
        f" {format_percent(row.single_correct, count)} of them correctly. For the others it names"
        f" several classes or none, and a person should check them. (Its prediction sets should"
        f" include the right class for {100 * row.coverage:.0f} % of the images, and do for"
        f" {format_percent(row.measured, count)}.)"
    )


def _describe_data(evaluation: "Evaluation") -> str:
    facts, clean, unknown = [], [], ""
    suspects = evaluation.examples.num_label_errors
    if not evaluation.beats_guessing():
        unknown += " Labels can't be checked by a model that may be guessing."
    elif suspects:
        facts.append(f"{suspects} of {evaluation.num_images:,} labels look wrong")
    else:
        clean.append("suspicious label")
    overlap = evaluation.duplicates_of_training
    if overlap is None:
        unknown += " Whether the model was trained on some of the images isn't known."
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
