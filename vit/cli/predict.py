"""`vit predict`: class probabilities for any images, as JSON lines or CSV."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from io import TextIOWrapper
from itertools import takewhile
from typing import Any

import typer

from vit.model.find_file import MODEL_FILE, find_model
from vit.runtime.command import Call, Command
from vit.runtime.console import echo
from vit.runtime.places import explain_file, suggest


def predict(call: Call, images: list[str]) -> None:
    """Predict the most probable classes of images.

    prediction_set names the classes that include the right one for 95 % of photos; without exactly
    one class, the photo is unsure. With a p_value of at most 0.05 it is unusual: unlike the training
    photos. Both are null if the model file has no thresholds, and for several models.

    An unreadable image gets a line with an error. If none can be read, the exit code is 1.

    Args:
        images: Files, folders or tables, or - for a list of them on standard input. Models before
            them (runs, model files, timm:NAME) are averaged with MODEL.
    """
    # file names of any bytes pass through; JSON is UTF-8, whatever the terminal's encoding
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    model, images = take_models(call.keywords["model"], images)
    check_images(model, images)
    # torch, which `vit --help` does without
    from vit.prediction.predict import iterate_predictions
    from vit.prediction.records import write_predictions
    from vit.runtime.progress import show_progress

    # a folder that is named alone is an error if it holds no images
    inputs: Any = list_names(images)
    if len(images) == 1 and images[0] != "-":
        inputs = images[0]
    # one batch after another, whereas the function keeps all predictions in memory
    keywords = {**call.keywords, "model": model}
    predictions = iterate_predictions(images=inputs, **keywords)
    output = keywords["output"]
    if not output:
        kind = "table" if sys.stdout.isatty() else "jsonl"
        predictions = write_predictions(predictions, file=sys.stdout, kind=kind)
    count, failed = 0, []
    with show_progress("images") as advance:
        for prediction in predictions:
            count += 1
            if prediction.error is not None:
                failed.append(f"{prediction.path}: {prediction.error}")
            advance(1, f"{count:,} images")
    if count == 0 and not keywords["resume"]:
        raise ValueError("there were no images to predict")
    if output:
        echo(f"{count:,} predictions were written into {output}")
    if keywords["classes"]:
        names = ", ".join(keywords["classes"])
        echo(f"only {names} could be predicted; classes share the probability", err=True)
    if failed:
        echo(f"{len(failed)} of {count} images could not be read, the first: {failed[0]}", err=True)
        if len(failed) == count:
            raise typer.Exit(1)


def take_models(model: str, images: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the models, of which those after the first precede the images, and the images."""

    def is_model(path: str) -> bool:
        is_run = os.path.isfile(os.path.join(path, MODEL_FILE))
        return is_run or path.startswith("timm:") or path.endswith(".safetensors")

    models = [model, *takewhile(is_model, images)]
    return models, list(images[len(models) - 1 :])


def check_images(models: Sequence[str], paths: Sequence[str]) -> None:
    """Raise the error of a model that isn't one; of the first path if none of them can hold images;
    and of a folder without images that is named alone."""
    # Pillow, which `vit --help` does without
    from vit.data.images import list_images

    for model in models:
        find_model(model)
    if not paths:
        raise ValueError(f"{models[-1]} is a model; name images after it")
    if len(paths) == 1 and os.path.isdir(paths[0]):
        next(list_images(paths[0]), None)
    known = (path for path in paths if path == "-" or os.path.lexists(path))
    if all(map(explain_file, known)):
        first = paths[0]
        raise ValueError(explain_file(first) or f"{first} does not exist{suggest(first)}")


def list_names(names: Iterable[str]) -> Iterator[str]:
    """Yield `names`, with the lines of standard input instead of -."""
    # File names may hold any bytes.
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    for name in names:
        if name == "-":
            yield from (line.rstrip("\r\n") for line in sys.stdin if line.strip())
        else:
            yield name


COMMAND = Command(run=predict, function="predict")
