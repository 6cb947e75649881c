"""`vit evaluate`: metrics with confidence intervals, errors and their attention maps."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vit.cli.common import Data, Device, Model, Output, Overwrite, Precision, Root, Split, build_console

if TYPE_CHECKING:
    from vit.evaluation.schema import Evaluation

_CALIBRATE = "fit a temperature on the validation split, into the model file"
_MIRRORED = "test-time augmentation: mean logits of the image and its mirror image"
_PICTURES = "errors, uncertain predictions and label errors to show, of each"
_BATCH_SIZE = "default: 256, or on a CPU the 64 that its caches hold"


def evaluate(
    model: Model,
    *,
    output: Output,
    data: Data = None,
    root: Root = None,
    split: Split = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help=_CALIBRATE)] = False,
    corruptions: Annotated[bool, typer.Option("--corruptions", help="fifteen corruptions at five severities")] = False,
    shift: Annotated[bool, typer.Option("--shift", help="move the images right and down")] = False,
    rotate: Annotated[bool, typer.Option("--rotate", help="rotate the images")] = False,
    mirrored: Annotated[bool, typer.Option("--mirrored", help=_MIRRORED)] = False,
    pictures: Annotated[int, typer.Option(min=0, help=_PICTURES)] = 16,
    batch_size: Annotated[int | None, typer.Option(min=1, help=_BATCH_SIZE)] = None,
    device: Device = "auto",
    precision: Precision = "auto",
    overwrite: Overwrite = False,
) -> None:
    """Measure a model on images it has not seen, and give 95 % confidence intervals.

    Writes evaluation.json and .md, predictions.csv, confusion.png and report.html.
    """
    from vit import api
    from vit.runtime.output_dir import check_output

    check_output(output, overwrite=overwrite)
    on: dict[str, Any] = {"data": data, "root": root, "split": split, "device": device, "precision": precision}
    changes: dict[str, Any] = {"corruptions": corruptions, "shift": shift, "rotate": rotate, "mirrored": mirrored}
    result = api.evaluate(model, **on, **changes, calibrate=calibrate, num_examples=pictures, batch_size=batch_size)
    if result.is_main:
        result.save(output, overwrite=overwrite)
        _show(result.evaluation, output)


def _show(evaluation: "Evaluation", output: Path) -> None:
    from rich.table import Table

    table = Table(title=f"{evaluation.num_images:,} images of {evaluation.data} ({evaluation.split})")
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("95 % interval", justify="right")
    for name in evaluation.list_metrics():
        low, high = evaluation.intervals[name]
        table.add_row(name, f"{getattr(evaluation, name):.4f}", f"{low:.4f} … {high:.4f}")
    if evaluation.mean_corruption_error is not None:
        table.add_row("mean corruption error", f"{evaluation.mean_corruption_error:.4f}", "")
    console = build_console()
    console.print(table)
    for sentence in evaluation.list_warnings():
        console.print(sentence, style="yellow")
    console.print(f"open {output / 'report.html'} in a browser")
