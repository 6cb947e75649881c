"""Predictions for loose image files, one batch in memory at a time."""

import csv
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np
from scipy.special import softmax

from vit.data.images import Preprocess, read_image
from vit.data.sets.folders import IMAGE_SUFFIXES
from vit.evaluation.predictor import Pixels, Predictor


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
            yield from find_images((line.rstrip("\r\n") for line in listed if line.strip()), listed=())
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
    predictor: Predictor,
    class_names: tuple[str, ...],
    temperature: float,
    top_k: int,
) -> Iterator[Prediction]:
    """Predictions in the order of `paths`; a file that can't be read gives one with its error."""
    with ThreadPoolExecutor() as pool:
        while batch := list(islice(paths, predictor.batch_size)):
            decoded = list(pool.map(lambda path: _decode(path, predictor.preprocess), batch))
            readable = [image for image in decoded if not isinstance(image, str)]
            top = iter(_rank(readable, predictor, class_names, temperature=temperature, top_k=top_k))
            for path, image in zip(batch, decoded, strict=True):
                if isinstance(image, str):
                    yield Prediction(path, [], error=image)
                else:
                    yield Prediction(path, next(top))


def write_jsonl(predictions: Iterable[Prediction], *, file: TextIO) -> Iterator[Prediction]:
    """Write one object a line, and hand each prediction on once it is written."""
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
        yield prediction


def write_csv(predictions: Iterable[Prediction], *, file: TextIO) -> Iterator[Prediction]:
    """Write one line for each class of an image: path, rank from 1, name, probability, error."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("path", "rank", "name", "probability", "error"))
    for prediction in predictions:
        for rank, (_, name, probability) in enumerate(prediction.classes, start=1):
            writer.writerow((prediction.path, rank, name, probability, ""))
        if prediction.error is not None:
            writer.writerow((prediction.path, "", "", "", prediction.error))
        yield prediction


def _decode(path: str, preprocess: Preprocess) -> Pixels | str:
    try:
        return preprocess.to_uint8(read_image(Path(path)))
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:
        return str(error)


def _rank(
    images: list[Pixels],
    predictor: Predictor,
    class_names: tuple[str, ...],
    *,
    temperature: float,
    top_k: int,
) -> list[list[tuple[int, str, float]]]:
    """(index, name, probability) of the `top_k` most probable classes of each image."""
    logits = predictor.predict(lambda start, stop: np.stack(images[start:stop]), count=len(images))
    probabilities = softmax(logits.astype(np.float64) / temperature, axis=1)
    order = np.argsort(-probabilities, axis=1, kind="stable")[:, :top_k]
    return [
        [(int(index), class_names[index], float(row[index])) for index in best]
        for row, best in zip(probabilities, order, strict=True)
    ]
