"""`vit evaluate`: metrics with confidence intervals, errors and their attention maps."""

from pathlib import Path
from typing import TYPE_CHECKING

from vit.options import EvaluateOptions
from vit.runtime.console import build_console, build_table

if TYPE_CHECKING:
    from vit.evaluation.schema import Evaluation


def evaluate(
    model: str, *, output: Path, options: EvaluateOptions, overwrite: bool = False
) -> None:
    """Measure a model on images it has not seen, and give 95 % confidence intervals.

    Writes evaluation.json and .md, predictions.csv, confusion.png and report.html.

    Args:
        model: model.safetensors, a training directory, timm:NAME or imagenette
        output: directory for the results
        overwrite: replace an earlier result
    """
    # torch, which `vit --help` does without
    from vit import api
    from vit.runtime.files import check_output

    # before minutes of work
    check_output(output, overwrite=overwrite)
    result = api.evaluate(model, **vars(options))
    if result.is_main:
        result.save(output, overwrite=overwrite)
        _show(result.evaluation, output)


def _show(evaluation: "Evaluation", output: Path) -> None:
    rows = []
    for name in evaluation.list_metrics():
        low, high = evaluation.intervals[name]
        rows.append((name, f"{getattr(evaluation, name):.4f}", f"{low:.4f} … {high:.4f}"))
    if evaluation.mean_corruption_error is not None:
        rows.append(("mean corruption error", f"{evaluation.mean_corruption_error:.4f}", ""))
    title = f"{evaluation.num_images:,} images of {evaluation.data} ({evaluation.split})"
    table = build_table(rows, ("metric", "value", "95 % interval"), title=title)

    console = build_console()
    console.print(table)
    console.print(evaluation.describe_accuracy(), highlight=False)
    for sentence in evaluation.list_warnings():
        console.print(sentence, style="yellow")
    console.print(f"open {output / 'report.html'} in a browser")
