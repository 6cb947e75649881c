"""`vit predict`: class probabilities for any images, as JSON lines or CSV."""

from enum import StrEnum
from typing import Annotated

import typer


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
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps")] = "auto",
    precision: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
) -> None:
    """Predict the most probable classes of images, in the order given.

    An image that can't be read gets a line with an error in its place. Progress goes to standard error.
    """
    import sys
    from io import TextIOWrapper

    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    from vit.bundle import load_bundle
    from vit.evaluation.predict_files import find_images, predict_files, write_csv, write_jsonl
    from vit.evaluation.predictor import Predictor
    from vit.runtime.device import choose_device, choose_precision
    from vit.runtime.memory import keep_freed_memory

    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="surrogateescape")  # file names of any bytes pass through
    chosen = choose_device(device)
    keep_freed_memory()
    bundle = load_bundle(model, device=chosen)
    predictor = Predictor(
        model=bundle.model,
        preprocess=bundle.preprocess,
        num_classes=len(bundle.class_names),
        batch_size=batch_size,
        device=chosen,
        precision=choose_precision(precision, chosen),
    )
    predictions = predict_files(
        find_images(images, listed=sys.stdin),
        predictor=predictor,
        class_names=bundle.class_names,
        temperature=bundle.temperature,
        top_k=top_k,
    )
    write = write_jsonl if output_format is Format.JSONL else write_csv
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn())
    done = unreadable = 0
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("images", total=None)
        for prediction in write(predictions, file=sys.stdout):
            done, unreadable = done + 1, unreadable + (prediction.error is not None)
            progress.advance(task)
    if done == 0:
        raise ValueError("there were no images to predict")
    if unreadable:
        console.print(
            f"{unreadable} of {done} images could not be read; their lines say why", highlight=False
        )
