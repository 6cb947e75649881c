"""From images in any form to predictions: the core of `vit.predict`, of `vit serve` and of engines
for many machines."""

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vit.bundle import Bundle, Models, open_model, require_classifier
from vit.data.images import open_pixels, read_image
from vit.data.preprocess import Preprocess
from vit.prediction.batch_predictor import BatchPredictor, Pixels, read_from
from vit.prediction.conformal import compute_p_values, predict_sets
from vit.prediction.decision import (
    compute_probabilities,
    decide_labels,
    find_class,
    rank_classes,
)
from vit.prediction.neighbours import compute_distances
from vit.prediction.probabilities import Bools
from vit.prediction.records import Prediction
from vit.runtime.arguments import as_tuple, check_minimum

# threads that decode images; more would keep more large photos in memory
_MIN_THREADS = 8
# an image's name, and its pixels as the model sees it or why it can't be read
Decoded = tuple[str, Pixels | str]


class Predictor:
    """A model as a callable from a batch of images to their predictions, for Ray, Spark or a queue
    of your own.

    Pickled, it holds the path of a model, which is opened on first use. A
    module is put into evaluation mode.

    Args:
        model: See `vit.evaluate`; or several, whose probabilities are averaged.
        classes: See `vit.predict`.
        top_k: Classes of each prediction of `predict_items`.
        batch_size: Images in a forward pass.
        device: See `vit.evaluate`.
        precision: See `vit.evaluate`.

    Raises:
        ValueError: The model can't be opened (on first use), or an option is
            wrong.

    Example:
        >>> predictor = vit.Predictor("runs/digits")
        >>> predictions = predictor(["photo.png", "other.png"])
        >>> predictions[0].predicted  # the name of a class
    """

    def __init__(
        self,
        model: Models,
        *,
        classes: str | Sequence[str] = (),
        top_k: int = 5,
        batch_size: int = 64,
        device: str = "auto",
        precision: str = "auto",
    ) -> None:
        check_minimum(1, top_k=top_k, batch_size=batch_size)
        self.model = model
        self.classes = as_tuple(classes)
        self.top_k = top_k
        self.batch_size = batch_size
        self.device = device
        self.precision = precision

    def __getstate__(self) -> dict[str, Any]:
        # a process that gets a predictor opens the model itself
        opened = ("bundle", "batch_predictor")
        return {name: value for name, value in vars(self).items() if name not in opened}

    @cached_property
    def bundle(self) -> Bundle:
        """The model, opened."""
        bundle = open_model(self.model, device=self.device)
        require_classifier(bundle)
        return bundle

    @cached_property
    def is_possible(self) -> Bools:
        """True for the classes that can be predicted, [C]."""
        names = self.bundle.class_names
        if self.classes and self.bundle.operating_point and not self.bundle.is_multilabel:
            raise ValueError("classes can't be chosen: the operating point is for all of them")
        places = [find_class(name, names) for name in self.classes] or range(len(names))
        return np.isin(range(len(names)), places)

    @cached_property
    def batch_predictor(self) -> BatchPredictor:
        """The inference loop."""
        return BatchPredictor.from_bundle(
            self.bundle, batch_size=self.batch_size, precision=self.precision
        )

    def __call__(self, images: Iterable[Any]) -> list[Prediction]:
        """Predict a batch of images: paths, encoded bytes, PIL images or uint8 arrays. See
        `PredictionResult.predictions` of `vit.predict`; `.to_dict()` gives plain values."""
        if isinstance(images, str | bytes | Image.Image) or getattr(images, "ndim", 1) in (2, 3):
            raise ValueError("images is one image; put it into a list")
        return list(
            self.predict_items(
                (str(image) if isinstance(image, str | Path) else f"image {place}", image)
                for place, image in enumerate(images)
            )
        )

    def predict_items(self, items: Iterable[tuple[str, Any]]) -> Iterator[Prediction]:
        """Yield the prediction of each image, in order, while one batch is in memory. Items are the
        name of each image, and its path, encoded bytes, PIL image or array."""
        missing = np.full(len(self.bundle.class_names), np.nan, np.float32)
        for batch in decode_batches(items, self.bundle.preprocess, self.batch_size):
            predictions = self.predict_pixels(
                [(name, pixels) for name, pixels in batch if not isinstance(pixels, str)]
            )
            for name, pixels in batch:
                if isinstance(pixels, str):
                    yield Prediction(name, [], error=pixels, probabilities=missing)
                else:
                    yield next(predictions)

    def predict_pixels(self, batch: Sequence[tuple[str, Pixels]]) -> Iterator[Prediction]:
        """Yield the prediction of each image of a batch, given its name and the input's pixels."""
        bundle, predictor, names = self.bundle, self.batch_predictor, self.bundle.class_names
        read = read_from([pixels for _, pixels in batch])
        p_values: list[float | None] = [None] * len(batch)
        if bundle.likeness is None:
            logits = predictor.predict(read, count=len(batch))
        else:
            logits, features = predictor.predict_with_features(read, count=len(batch))
            distances = compute_distances(features, bundle.likeness.training_features)
            held_out = bundle.likeness.distances.astype(np.float64)
            p_values = compute_p_values(distances, held_out).tolist()
        logits = np.where(self.is_possible, logits, -np.inf)
        # the temperature changes probabilities, but neither the order of classes nor the sets
        probabilities = compute_probabilities(bundle, logits)
        sets = predict_sets(bundle, logits)
        is_found = decide_labels(bundle, probabilities)
        for row, ranked in enumerate(rank_classes(bundle, probabilities)):
            labels = None
            if bundle.is_multilabel:
                labels = [names[index] for index in ranked if is_found[row, index]]
            yield Prediction(
                batch[row][0],
                [
                    (index, names[index], float(probabilities[row, index]))
                    for index in ranked[: self.top_k]
                    if self.is_possible[index]
                ],
                prediction_set=sets[row],
                p_value=p_values[row],
                labels=labels,
                probabilities=probabilities[row].astype(np.float32),
            )


def decode_batches(
    items: Iterable[tuple[str, Any]], preprocess: Preprocess, batch_size: int
) -> Iterator[list[Decoded]]:
    """Yield images in batches, decoded for a model; the next batch is decoded while the caller
    works on one. See `Predictor.predict_items`."""

    def decode(item: tuple[str, Any]) -> Decoded:
        name, image = item
        try:
            return name, preprocess.to_uint8(_open_image(name, image))
        except (OSError, ValueError) as error:
            # without the path, which the prediction already names
            return name, getattr(error, "strerror", None) or str(error)

    # decoding a photo may take longer than its forward pass
    pool = ThreadPoolExecutor(max(os.cpu_count() or 1, _MIN_THREADS))
    left = iter(items)
    started = map(partial(pool.map, decode), iter(lambda: list(islice(left, batch_size)), []))
    try:
        # the first of a pair is taken when the second one has been started
        for batch, _ in pairwise(chain(started, [()])):
            yield list(batch)
    finally:
        pool.shutdown(cancel_futures=True)


def _open_image(name: str, image: Any) -> Image.Image:
    if isinstance(image, Mapping) and "bytes" in image:
        # as Hugging Face stores it
        image = image["bytes"] or image.get("path")
    if isinstance(image, str | Path):
        return read_image(Path(image))
    if isinstance(image, bytes | bytearray | memoryview):
        return read_image(io.BytesIO(image), name=name)
    return open_pixels(image)
