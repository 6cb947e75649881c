"""From images in any form to predictions: the core of `vit.predict`, of `vit serve` and of engines
for many machines."""

import io
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vit.bundle import Bundle, Models, open_model, require_classifier
from vit.data.images import list_images, read_image
from vit.data.inputs import LazyImage
from vit.data.preprocess import Preprocess
from vit.data.sources.remote import MissingError, RemoteError
from vit.model.logits import count_features, has_features
from vit.prediction.conformal import predict_p_values, predict_sets
from vit.prediction.decision import decide_classes
from vit.prediction.labels import compute_probabilities, find_labels
from vit.prediction.neighbours import check_similar, find_similar
from vit.prediction.predictor import BatchPredictor, Pixels, read_from
from vit.prediction.records import Prediction
from vit.runtime.arguments import check_arguments

# name of a column → an array with an entry for each image
Columns = dict[str, Any]
# threads that decode images; more would keep more large photos in memory
_MIN_THREADS = 8
# an image's name, and its pixels as the model sees it or why it can't be read
Decoded = tuple[str, Pixels | str]


class Predictor:
    """A model as a callable from a batch of images to a dictionary of arrays, for Ray Data or a
    queue of your own.

    The last bits of a result may depend on the number of images in a batch.

    It can be pickled, also for a process that is started by "spawn": with the
    path of a model, which is opened there on first use. A module is put into
    evaluation mode.

    Args:
        model: See `vit.evaluate`; or several, whose probabilities are averaged.
        top_k: Classes of each record of `predict`.
        batch_size: Images in a forward pass.
        device: See `vit.evaluate`.
        precision: See `vit.evaluate`.
        embeddings: Add the features that the head reads.
        similar: Training images that each record of `predict` names, see
            `vit.predict`.

    Raises:
        ValueError: The model can't be opened (on first use), or an option is
            wrong.

    Example:
        >>> predictor = vit.Predictor("runs/digits")
        >>> columns = predictor(["photo.png", "other.png"])
        >>> columns["predicted"]  # the names of two classes
    """

    @check_arguments(top_k=(1, None), batch_size=(1, None), similar=(0, None))
    def __init__(
        self,
        model: Models,
        *,
        top_k: int = 5,
        batch_size: int = 64,
        device: str = "auto",
        precision: str = "auto",
        embeddings: bool = False,
        similar: int = 0,
    ) -> None:
        self.model = model
        self.top_k = top_k
        self.batch_size = batch_size
        self.device = device
        self.precision = precision
        self.embeddings = embeddings
        self.similar = similar
        # columns have the probability of every class
        self.keeps_probabilities = False

    def __getstate__(self) -> dict[str, Any]:
        # a process that is sent a predictor opens the model itself
        opened = ("bundle", "batch_predictor")
        return {name: value for name, value in vars(self).items() if name not in opened}

    @cached_property
    def bundle(self) -> Bundle:
        """The model, opened."""
        bundle = open_model(self.model, device=self.device)
        require_classifier(bundle)
        if self.embeddings and not has_features(bundle.model):
            raise ValueError(f"a {type(bundle.model).__name__} gives no features to embed")
        if self.similar:
            check_similar(bundle)
        return bundle

    @cached_property
    def batch_predictor(self) -> BatchPredictor:
        """The inference loop."""
        return BatchPredictor.from_bundle(
            self.bundle, batch_size=self.batch_size, precision=self.precision
        )

    def __call__(self, images: Iterable[Any] | Mapping[str, Any]) -> Columns:
        """Predict a batch of images.

        Args:
            images: Paths, encoded bytes, PIL images or uint8 arrays; or a dictionary of columns with
                one of `image`, `bytes` or `path`, as Ray passes it. Its other columns are passed on.

        Returns:
            Arrays of equal length: `predicted` (several labels with bars between them),
            `probability`, `probabilities` [n, C] float32, `note`, `labels` (of a model of several
            labels an image), `prediction_set`, `p_value`, `embedding` [n, D] (if asked for),
            `precision` and `error`. An image that can't be read has an error, NaN for numbers and
            None for the rest.
        """
        # columns by which the caller joins the rows with its own come back
        others, named = _split_columns(images)
        self.keeps_probabilities = True
        predictions = list(self.predict_items(named))
        rows = [{"note": "", **prediction.to_dict()} for prediction in predictions]
        names = [
            "path",
            "predicted",
            "probability",
            "note",
            *["labels"] * self.bundle.is_multilabel,
        ]
        columns: Columns = {}
        for name in (*names, "prediction_set", "p_value", "precision", "error"):
            # numpy would make a matrix of lists of equal length
            column = np.empty(len(rows), dtype=object)
            column[:] = [row.get(name) for row in rows]
            columns[name] = column
        for name in ("probability", "p_value"):
            # None becomes NaN
            columns[name] = columns[name].astype(float)
        matrices: dict[str, list[Any]] = {
            "probabilities": [each.probabilities for each in predictions]
        }
        widths = {"probabilities": len(self.bundle.class_names)}
        if self.embeddings:
            matrices["embedding"] = [each.features for each in predictions]
            widths["embedding"] = count_features(self.bundle.model)
        for name, vectors in matrices.items():
            missing = np.full(widths[name], np.nan)
            stacked = [missing if vector is None else vector for vector in vectors]
            columns[name] = np.array(stacked, np.float32).reshape(-1, widths[name])
        return {**columns, **others}

    def predict(self, images: Iterable[Any]) -> list[Prediction]:
        """Return the prediction of each image of a batch as a record. See `__call__`."""
        return list(self.predict_items(_split_columns(images)[1]))

    def predict_items(self, items: Iterable[tuple[str, Any]]) -> Iterator[Prediction]:
        """Yield the prediction of each image, in order, while one batch is in memory.

        Args:
            items: Name of each image, and its path, encoded bytes, PIL image or array.
        """
        for batch in decode_batches(items, self.bundle.preprocess, self.batch_size):
            readable = [(name, pixels) for name, pixels in batch if not isinstance(pixels, str)]
            predictions: Iterator[Prediction] = iter(())
            if readable:
                predictions = self.predict_pixels(readable)
            for name, pixels in batch:
                if isinstance(pixels, str):
                    precision = self.batch_predictor.precision
                    yield Prediction(name, [], error=pixels, precision=precision)
                else:
                    yield next(predictions)

    def predict_pixels(self, batch: Sequence[tuple[str, Pixels]]) -> Iterator[Prediction]:
        """Yield the prediction of each image of a batch: its name, and its pixels as the model sees
        them."""
        bundle, predictor = self.bundle, self.batch_predictor
        count = len(batch)
        read = read_from([pixels for _, pixels in batch])
        # features are computed only if something needs them: some models have none
        features = None
        if bundle.likeness is None and not self.embeddings:
            logits = predictor.predict(read, count=count)
        else:
            logits, features = predictor.predict_with_features(read, count=count)
        # the temperature changes probabilities, but neither the order of classes nor the sets
        probabilities = compute_probabilities(bundle, logits)
        # columns that not every model has, or nobody asked for
        columns: dict[str, Sequence[Any] | None] = {
            "prediction_set": predict_sets(bundle, logits),
            "p_value": predict_p_values(bundle, features),
        }
        if self.keeps_probabilities:
            columns["probabilities"] = list(probabilities)
        if features is not None and self.similar:
            columns["similar"] = find_similar(bundle, features, self.similar)
        if features is not None and self.embeddings:
            columns["features"] = list(features)
        known = {name: values for name, values in columns.items() if values is not None}
        order = probabilities.copy()
        if bundle.operating_point and not bundle.is_multilabel:
            # the predicted class comes first, whatever its probability
            order[np.arange(count), decide_classes(bundle, probabilities)] = np.inf
        names = bundle.class_names
        for row, (path, _) in enumerate(batch):
            # a stable order: of equally probable classes the first one comes first
            best = np.argsort(-order[row], kind="stable")[: self.top_k].tolist()
            yield Prediction(
                path,
                [(index, names[index], float(probabilities[row, index])) for index in best],
                labels=find_labels(bundle, probabilities[row]),
                precision=predictor.precision,
                **{name: values[row] for name, values in known.items()},
            )


def _split_columns(
    images: Iterable[Any] | Mapping[str, Any],
) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Return the columns of a batch that are passed on, and the name and image of each row."""
    shape: Any = getattr(images, "shape", ())
    is_one = len(shape) == 3 and shape[-1] in (1, 3)
    if is_one or isinstance(images, str | bytes | Image.Image):
        raise ValueError("images is one image; put it into a list")
    if not isinstance(images, Mapping):
        rows = list(images)
        names = [
            str(row) if isinstance(row, str | Path) else f"image {number}"
            for number, row in enumerate(rows)
        ]
        return {}, list(zip(names, rows, strict=True))
    columns = dict(images)
    if len(set(map(len, columns.values()))) > 1:
        raise ValueError("the columns of the batch have different numbers of rows")
    found = next((name for name in ("image", "bytes", "path") if name in columns), None)
    if found is None:
        have = ", ".join(map(str, columns))
        raise ValueError(f"the batch has the columns {have}; name one image, bytes or path")
    rows = list(columns["path"] if found == "path" else columns.pop(found))
    names = columns.get("path", [f"image {number}" for number in range(len(rows))])
    return columns, list(zip(map(str, names), rows, strict=True))


def decode_batches(
    items: Iterable[tuple[str, Any]], preprocess: Preprocess, batch_size: int
) -> Iterator[list[Decoded]]:
    """Yield images in batches, decoded for a model; the next batch is decoded while the caller
    works on one. See `Predictor.predict_items`."""
    items = iter(items)
    # decoding a photo may take longer than its forward pass, and an address has to be waited for
    pool = ThreadPoolExecutor(max(os.cpu_count() or 1, _MIN_THREADS))
    ahead: deque[tuple[list[str], list[Future[Pixels | str]]]] = deque()
    try:
        while True:
            while len(ahead) < 2 and (batch := list(islice(items, batch_size))):
                names = [name for name, _ in batch]
                ahead.append((names, [pool.submit(_decode, *each, preprocess) for each in batch]))
            if not ahead:
                return
            names, futures = ahead.popleft()
            yield [(name, each.result()) for name, each in zip(names, futures, strict=True)]
    finally:
        pool.shutdown(cancel_futures=True)


def _decode(name: str, image: Any, preprocess: Preprocess) -> Pixels | str:
    """Return the image as the model sees it, uint8 [H, W, 3], or why it can't be read."""
    try:
        return preprocess.to_uint8(_open_image(name, image))
    except (OSError, ValueError) as error:
        # the store doesn't answer, and the image may be good
        if isinstance(error, RemoteError) and not isinstance(error, MissingError):
            raise
        # without the path, which the prediction already names
        return getattr(error, "strerror", None) or str(error)


def _open_image(name: str, image: Any) -> Image.Image:
    if isinstance(image, Mapping) and "bytes" in image:
        # as Hugging Face stores it
        image = image["bytes"] or image.get("path")
    if isinstance(image, LazyImage):
        image = image.load()
    if isinstance(image, str | Path):
        return read_image(Path(image))
    if isinstance(image, bytes | bytearray | memoryview):
        return read_image(io.BytesIO(image), name=name)
    if image is None:
        raise ValueError("there is no image")
    (opened,) = list_images(image)
    assert isinstance(opened, Image.Image)
    return opened
