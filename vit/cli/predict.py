"""`vit predict`: class probabilities for any images, as JSON lines or CSV."""

import sys
from io import TextIOWrapper
from typing import Annotated, Any, Literal

import typer

from vit.cli.common import Device, Model, Precision, list_names


def predict(
    model: Model,
    images: Annotated[list[str], typer.Argument(help="files, folders, or - for a list on standard input")],
    *,
    top_k: Annotated[int, typer.Option(min=1, help="classes an image")] = 5,
    output_format: Annotated[Literal["jsonl", "csv"], typer.Option("--format", help="of standard output")] = "jsonl",
    batch_size: Annotated[int, typer.Option(min=1)] = 64,
    device: Device = "auto",
    precision: Precision = "auto",
) -> None:
    """Predict the most probable classes of images, in the order given.

    An image that can't be read gets a line with an error in its place. Progress goes to standard error.
    """
    from vit import api
    from vit.evaluation.prediction import write_csv, write_jsonl
    from vit.runtime.progress import show_progress

    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # file names of any bytes pass through
    running: dict[str, Any] = {"batch_size": batch_size, "device": device, "precision": precision}
    given = images[0] if len(images) == 1 and images[0] != "-" else list_names(images)
    predictions = api.iterate_predictions(model, given, top_k=top_k, **running)
    write = write_jsonl if output_format == "jsonl" else write_csv
    count = unreadable = 0
    with show_progress("images", None) as advance:
        for prediction in write(predictions, file=sys.stdout):
            count, unreadable = count + 1, unreadable + (prediction.error is not None)
            advance(1)
    if count == 0:
        raise ValueError("there were no images to predict")
    if unreadable:
        typer.echo(f"{unreadable} of {count} images could not be read; their lines say why", err=True)
