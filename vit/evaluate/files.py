"""Predictions for loose image files, one batch in memory at a time."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from vit.data.images import Preprocess, read_image
from vit.data.sources import IMAGE_SUFFIXES
from vit.evaluate.predict import Precision, compute_logits


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one file, (index, name, probability) each; or why there are none."""

    path: str
    classes: list[tuple[int, str, float]]
    error: str | None = None


def find_images(names: Iterable[str], *, listed: Iterable[str]) -> Iterator[str]:
    """The files meant by `names`, in order: a folder is the images below it, sorted; - the lines of `listed`.

    Raises ValueError for a folder without images. A name that isn't there is passed on: reading it says so.
    """
    for name in names:
        if name == "-":
            yield from find_images((line.rstrip("\n") for line in listed if line.strip()), listed=())
        elif Path(name).is_dir():
            paths = [str(path) for path in Path(name).rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES]
            if not paths:
                raise ValueError(f"{name} holds no images")
            yield from sorted(paths)
        else:
            yield name


def predict_files(
    paths: Iterator[str],
    *,
    model: nn.Module,
    preprocess: Preprocess,
    class_names: tuple[str, ...],
    temperature: float,
    top_k: int,
    batch_size: int,
    device: torch.device,
    precision: Precision,
) -> Iterator[Prediction]:
    """Predictions in the order of `paths`; a file that can't be read gives one with its error."""

    def decode(path: str) -> NDArray[np.uint8] | str:
        try:
            return preprocess.to_uint8(read_image(Path(path)))
        except (ValueError, OSError) as error:
            return str(error)

    with ThreadPoolExecutor() as pool:
        while batch := list(islice(paths, batch_size)):
            pixels = list(pool.map(decode, batch))
            readable = [image for image in pixels if not isinstance(image, str)]
            top: Iterator[list[tuple[int, str, float]]] = iter(())
            if readable:
                with (
                    torch.inference_mode(),
                    torch.autocast(device.type, getattr(torch, precision), enabled=precision != "float32"),
                ):
                    images = preprocess.normalize(torch.from_numpy(np.stack(readable)).to(device))
                    logits = compute_logits(model, images)
                probabilities, indices = (
                    (logits / temperature).softmax(dim=1).topk(min(top_k, len(class_names)))
                )
                top = (
                    [(index, class_names[index], value) for index, value in zip(row, values, strict=True)]
                    for row, values in zip(indices.tolist(), probabilities.tolist(), strict=True)
                )
            for path, image in zip(batch, pixels, strict=True):
                if isinstance(image, str):
                    yield Prediction(path, [], error=image)
                else:
                    yield Prediction(path, next(top))


def write_jsonl(
    predictions: Iterable[Prediction], *, file: TextIO, on_progress: Callable[[], object]
) -> tuple[int, int]:
    """One object a line; returns how many lines, and how many of them are errors."""
    done = unreadable = 0
    for prediction in predictions:
        line: dict[str, object] = {"path": prediction.path}
        if prediction.error is None:
            line["predictions"] = [
                {"index": index, "name": name, "probability": probability}
                for index, name, probability in prediction.classes
            ]
        else:
            line["error"] = prediction.error
        file.write(json.dumps(line, ensure_ascii=False) + "\n")
        done, unreadable = done + 1, unreadable + (prediction.error is not None)
        on_progress()
    return done, unreadable


def write_csv(
    predictions: Iterable[Prediction], *, file: TextIO, on_progress: Callable[[], object]
) -> tuple[int, int]:
    """One line a class of an image: path, rank from 1, name, probability, error; returns as `write_jsonl`."""
    done = unreadable = 0
    writer = csv.writer(file)
    writer.writerow(("path", "rank", "name", "probability", "error"))
    for prediction in predictions:
        for rank, (_, name, probability) in enumerate(prediction.classes, start=1):
            writer.writerow((prediction.path, rank, name, probability, ""))
        if prediction.error is not None:
            writer.writerow((prediction.path, "", "", "", prediction.error))
        done, unreadable = done + 1, unreadable + (prediction.error is not None)
        on_progress()
    return done, unreadable
