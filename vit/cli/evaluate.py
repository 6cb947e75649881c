"""`vit evaluate`: metrics with confidence intervals, errors and their attention maps."""

from pathlib import Path
from typing import Any

from vit.runtime.command import Command
from vit.runtime.console import build_console, build_table


def evaluate(result: Any, output: Path) -> None:
    """Measure a model on held-out images, with intervals.

    Writes report.html, evaluation.json, predictions.csv, and predictions.npz for vit compare. The
    probabilities of several models are averaged.
    """
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


COMMAND = Command(run=evaluate, function="evaluate", is_saved=True, kinds={"model": list[str]})
