"""`vit predict`: class probabilities for any images, as JSON lines or CSV."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Format(StrEnum):
    """How predictions are written to standard output."""

    JSONL = "jsonl"
    CSV = "csv"


def predict(
    model: Annotated[str, typer.Argument(help="model.safetensors, a training directory or timm:NAME")],
    images: Annotated[list[str], typer.Argument(help="files, folders, or - for a list on standard input")],
    top_k: Annotated[int, typer.Option(min=1, help="classes an image")] = 5,
    output_format: Annotated[Format, typer.Option("--format", help="of standard output")] = Format.JSONL,
    batch_size: Annotated[int, typer.Option(min=1)] = 64,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    precision: Annotated[str, typer.Option(help="auto, float32 or bfloat16")] = "auto",
) -> None:
    """Predict the most probable classes of images, in the order given.

    An image that can't be read gets a line with an error in its place. Progress goes to standard error.
    """
    import sys
    from io import TextIOWrapper

    from rich.console import Console

    from vit.bundle import load_bundle
    from vit.evaluation.prediction import predict_images, write_csv, write_jsonl
    from vit.runtime.device import choose_device
    from vit.runtime.memory import keep_freed_memory
    from vit.runtime.progress import show_progress

    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="surrogateescape")  # file names of any bytes pass through
    keep_freed_memory()
    bundle = load_bundle(model, device=choose_device(device))
    predictions = predict_images(
        bundle, _read_names(images, sys.stdin), top_k=top_k, batch_size=batch_size, precision=precision
    )
    write = write_jsonl if output_format is Format.JSONL else write_csv
    done = unreadable = 0
    with show_progress("images", None) as advance:
        for prediction in write(predictions, file=sys.stdout):
            done, unreadable = done + 1, unreadable + (prediction.error is not None)
            advance(1)
    if done == 0:
        raise ValueError("there were no images to predict")
    if unreadable:
        message = f"{unreadable} of {done} images could not be read; their lines say why"
        Console(stderr=True).print(message, highlight=False)


def _read_names(names: "Iterable[str]", listed: "Iterable[str]") -> "Iterator[str]":
    """`names`, with the lines of `listed` in the place of -."""
    for name in names:
        yield from (line.rstrip("\r\n") for line in listed if line.strip()) if name == "-" else (name,)
