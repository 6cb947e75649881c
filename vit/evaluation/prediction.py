"""Class probabilities for images outside any data set, one batch in memory at a time."""

import csv
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np
from PIL import Image
from scipy.special import softmax

from vit.bundle import Bundle
from vit.data.images import Preprocess, open_image
from vit.data.inputs import ImageInputs, list_images
from vit.evaluation.predictor import Pixels, Predictor
from vit.runtime.files import write_atomically
from vit.runtime.output_dir import prepare_output

Classes = list[tuple[int, str, float]]  # index, name and probability, the most probable first


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one image, or why there are none."""

    path: str  # of a PIL image or an array "image 0", by its place
    classes: Classes
    error: str | None = None


@dataclass(frozen=True)
class PredictionResult:
    """Predictions in the order of the images."""

    predictions: list[Prediction]

    def save(self, directory: str | Path, *, overwrite: bool = False) -> None:
        """Write predictions.jsonl, one JSON object for each image, into `directory`."""

        def write(temporary: Path) -> None:
            with temporary.open("w", encoding="utf-8", errors="surrogateescape") as file:
                list(write_jsonl(self.predictions, file=file))

        write_atomically(prepare_output(Path(directory), overwrite=overwrite) / "predictions.jsonl", write)


def predict_images(
    bundle: Bundle, images: ImageInputs, *, top_k: int = 5, batch_size: int = 64, precision: str = "auto"
) -> Iterator[Prediction]:
    """The `top_k` most probable classes of each image, in order; of one that can't be read, its error."""
    predictor = Predictor.from_bundle(bundle, batch_size=batch_size, precision=precision)
    numbered = enumerate(list_images(images))
    with ThreadPoolExecutor() as pool:
        while batch := list(islice(numbered, batch_size)):
            decoded = list(pool.map(lambda pair: _decode(pair[1], predictor.preprocess), batch))
            readable = [pixels for pixels in decoded if not isinstance(pixels, str)]
            top = _rank(readable, predictor, bundle, top_k=top_k)
            for (number, image), pixels in zip(batch, decoded, strict=True):
                path = image if isinstance(image, str) else f"image {number}"
                error = pixels if isinstance(pixels, str) else None
                yield Prediction(path, next(top) if error is None else [], error)


def write_jsonl(predictions: Iterable[Prediction], *, file: TextIO) -> Iterator[Prediction]:
    """Write one object a line, and hand each prediction on once it is written."""
    for prediction in predictions:
        classes = [dict(zip(("index", "name", "probability"), best, strict=True)) for best in prediction.classes]
        outcome = {"predictions": classes} if prediction.error is None else {"error": prediction.error}
        file.write(json.dumps({"path": prediction.path, **outcome}, ensure_ascii=False) + "\n")
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


def _decode(image: str | Image.Image, preprocess: Preprocess) -> Pixels | str:
    """The image as the model sees it, uint8 [H, W, 3], or why it can't be read."""
    try:
        if not isinstance(image, str):
            return preprocess.to_uint8(image)
        with open_image(Path(image)) as opened:
            return preprocess.to_uint8(opened)
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)


def _rank(images: list[Pixels], predictor: Predictor, bundle: Bundle, *, top_k: int) -> Iterator[Classes]:
    logits = predictor.predict(lambda start, stop: np.stack(images[start:stop]), count=len(images))
    for row in softmax(logits.astype(np.float64) / bundle.temperature, axis=1):
        best = np.argsort(-row, kind="stable")[:top_k].tolist()
        yield [(index, bundle.class_names[index], float(row[index])) for index in best]
