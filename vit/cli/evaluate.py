"""`vit evaluate`: metrics with confidence intervals, errors and their attention maps."""

from functools import partial
from pathlib import Path

from vit.runtime.command import Call, Command
from vit.runtime.console import build_console, build_table
from vit.runtime.files import compute_and_save


def evaluate(measure: Call, model: list[str], *, output: Path, overwrite: bool = False) -> None:
    """Measure a model on held-out images, with intervals.

    Writes report.html, evaluation.json, predictions.csv, and predictions.npz for vit compare.

    Args:
        model: Model files, runs, timm:NAME or imagenette; the probabilities of several are
            averaged.
        output: Directory for the results.
        overwrite: Replace an earlier result.
    """
    result = compute_and_save(
        partial(measure, model if len(model) > 1 else model[0]), output, overwrite=overwrite
    )
    if not result.is_main:
        return
    evaluation = result.evaluation
    rows = evaluation.list_rows()
    title = f"{evaluation.num_images:,} images of {evaluation.data} ({evaluation.split})"
    table = build_table(rows, ("metric", "value", "95 % interval"), title=title)
    console = build_console()
    console.print(table)
    console.print(f"{evaluation.describe_accuracy()} {evaluation.describe_guessing()}")
    for sentence in evaluation.list_warnings():
        console.print(sentence, style="yellow")
    console.print(f"open {output / 'report.html'} in a browser")


COMMAND = Command(run=evaluate, function="evaluate", python_only=("dataset", "class_names"))
