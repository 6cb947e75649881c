"""`vit predict`: class probabilities for any images, as JSON lines or CSV."""

import sys
from io import TextIOWrapper
from typing import Annotated, Literal

import typer

from vit.cli.common import list_names
from vit.options import Option, PredictOptions


def predict(
    model: str,
    images: list[str],
    *,
    options: PredictOptions,
    output_format: Annotated[Literal["jsonl", "csv"], Option(flag="--format")] = "jsonl",
) -> None:
    """Predict the most probable classes of images, in the order given.

    prediction_set names the classes that hold the right one as often as --coverage says, and p_value
    says how likely a photo like the training's is to be as far from them; both are null where the
    model file has no thresholds. With --similar N, similar names the training images that are most
    like the photo, with their class.

    An image that can't be read gets a line with an error in its place; if none can, the exit code is
    1. Progress goes to standard error.

    Args:
        model: model.safetensors, a training directory, timm:NAME or imagenette
        images: files, folders, or - for a list on standard input
        output_format: of standard output
    """
    # torch, which `vit --help` does without
    from vit import api
    from vit.prediction.predictor import write_csv, write_jsonl
    from vit.runtime.progress import show_progress

    # file names of any bytes pass through; JSON is UTF-8, whatever the terminal's encoding
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    if options.similar and output_format == "csv":
        raise ValueError("--similar needs --format jsonl: a line of CSV is a class of an image")
    # a folder that is named alone is an error if it holds no images
    is_one_path = len(images) == 1 and images[0] != "-"
    predictions = api.iterate_predictions(
        model, images[0] if is_one_path else list_names(images), options
    )
    write = {"jsonl": write_jsonl, "csv": write_csv}[output_format]
    count = 0
    num_unreadable = 0
    with show_progress("images", None) as advance:
        for prediction in write(predictions, file=sys.stdout):
            count += 1
            num_unreadable += prediction.error is not None
            advance(1)
    if count == 0:
        raise ValueError("there were no images to predict")
    if num_unreadable:
        message = f"{num_unreadable} of {count} images could not be read; their lines say why"
        typer.echo(message, err=True)
    if num_unreadable == count:
        raise typer.Exit(1)
