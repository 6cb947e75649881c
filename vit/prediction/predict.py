"""Class probabilities and features of any images: `vit.predict` and `vit.embed`."""

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vit.bundle import Bundle, ModelLike, keeps_mode, open_model, require_classifier
from vit.data.dataset import printable
from vit.data.images import ImageInputs, list_images
from vit.model.logits import count_features
from vit.prediction.ensemble import open_models
from vit.prediction.image_predictor import Predictor, decode_batches
from vit.prediction.predictor import TTA, BatchPredictor, Pixels, read_from
from vit.prediction.probabilities import Float32s
from vit.prediction.records import Prediction, PredictionResult
from vit.prediction.sorting import PhotoSorter
from vit.runtime.arguments import check_arguments, check_choice
from vit.runtime.files import expand_home, save_arrays, write_atomically

_ORDERS = ("none", "uncertainty")


@keeps_mode
@check_arguments(top_k=(1, None), similar=(0, None), batch_size=(1, None))
def predict(
    model: ModelLike | Sequence[ModelLike],
    images: ImageInputs,
    *,
    top_k: int = 5,
    coverage: float = 0.95,
    sort_into: str | Path | None = None,
    embeddings: str | Path | None = None,
    similar: int = 0,
    tta: str = "none",
    sort: str = "none",
    batch_size: int = 64,
    device: str = "auto",
    precision: str = "auto",
) -> PredictionResult:
    """Predict the most probable classes of images.

    Args:
        model: See `vit.evaluate`.
        images: Paths, folders, PIL images, uint8 arrays [H, W, 3] or
            [n, H, W, 3], or one of them.
        top_k: Classes for each image.
        coverage: How often a `prediction_set` should include the right class,
            or the fraction of an image's labels that it should include: 0.9
            or 0.95.
        sort_into: Folder to copy the photos into: one folder for each class,
            "unsure" and "unusual". A photo goes to "unusual" if its `p_value`
            is at most 0.05, to its class if its `prediction_set` has one
            class, and to "unsure" otherwise. With an operating point it
            always goes to the predicted class, and a photo of several labels
            to each of them. No file is ever overwritten.
        embeddings: File for the features that the head reads: FILE.npz or
            FILE.parquet. The .npz file holds `paths` [N] and `embeddings`
            [N, D] float32, the table the columns path and embedding.
        similar: Number of most similar training images to name for each
            image. Similarity is the cosine of the features, and the model
            file holds up to 2,000 training images.
        tta: See `vit.evaluate`.
        sort: Order of the predictions: none, that of the images, or
            uncertainty, the most uncertain first, to choose what to label
            next. It keeps all predictions in memory until the last one.
        batch_size: Images at a time.
        device: See `vit.evaluate`.
        precision: See `vit.evaluate`.

    Returns:
        The result: `.predictions` in the order of the images. An image that
        can't be read has an `error` instead of classes. Where an image may
        have several labels, `.labels` has those it is predicted to have.

    Raises:
        ValueError: The model can't be opened, an input is not an image, or
            the model has no prediction sets to sort photos by.

    Example:
        >>> result = vit.predict("runs/digits", "photo.png", top_k=3)
        >>> result.predictions[0].classes  # [(index, name, probability), …]
    """
    predictions = iterate_predictions(
        model,
        images,
        top_k=top_k,
        coverage=coverage,
        sort_into=sort_into,
        embeddings=embeddings,
        similar=similar,
        tta=tta,
        sort=sort,
        batch_size=batch_size,
        device=device,
        precision=precision,
    )
    return PredictionResult(list(predictions))


@keeps_mode
@check_arguments(batch_size=(1, None))
def embed(
    model: ModelLike,
    images: ImageInputs,
    *,
    batch_size: int = 64,
    device: str = "auto",
    precision: str = "auto",
) -> Float32s:
    """Compute the pooled features of images, which the model's head reads.

    Args:
        model: See `vit.evaluate`.
        images: See `vit.predict`.
        batch_size: Images at a time.
        device: See `vit.evaluate`.
        precision: See `vit.evaluate`.

    Returns:
        Features [N, D], float32, in the order of the images. The features of
        similar images have a large cosine.

    Raises:
        ValueError: The model can't be opened, or an image can't be read.

    Example:
        >>> features = vit.embed("runs/digits", ["photo.png", "other.png"])
        >>> features.shape  # (2, D)
    """
    bundle = open_model(model, device=device)
    predictor = BatchPredictor.from_bundle(bundle, batch_size=batch_size, precision=precision)
    features = [np.zeros((0, count_features(bundle.model)), dtype=np.float32)]
    for batch in decode_batches(_name_images(images), [predictor.preprocess], batch_size):
        pixels: list[Pixels] = []
        for path, decoded in batch:
            if isinstance(decoded, str):
                raise ValueError(f"{path} has no features: {decoded}")
            pixels += decoded
        _, found = predictor.predict_with_features(read_from(pixels), count=len(pixels))
        features.append(found)
    return np.concatenate(features)


def iterate_predictions(
    model: ModelLike | Sequence[ModelLike],
    images: ImageInputs,
    *,
    top_k: int,
    coverage: float,
    sort_into: str | Path | None,
    embeddings: str | Path | None,
    similar: int,
    tta: str,
    sort: str,
    batch_size: int,
    device: str,
    precision: str,
) -> Iterator[Prediction]:
    """Yield the predictions of `predict`, for any number of images: one batch is in memory, unless
    they are sorted."""
    check_choice(tta, TTA, name="tta")
    check_choice(sort, _ORDERS, name="sort")
    bundle = open_models(model, device=device)
    require_classifier(bundle)
    predictions = predict_images(
        bundle,
        images,
        top_k=top_k,
        coverage=coverage,
        tta=tta,
        batch_size=batch_size,
        precision=precision,
        with_features=embeddings is not None,
        similar=similar,
    )
    if sort_into is not None:
        sorter = PhotoSorter(Path(sort_into), bundle, coverage=coverage)
        sorter.check(images)
        predictions = map(sorter.copy, predictions)
    if embeddings is not None:
        path = expand_home(embeddings)
        _check_embeddings_file(path)
        predictions = _keep_embeddings(predictions, path)
    if sort == "uncertainty":
        # Images that can't be read come last; of equal ones, the first comes first.
        predictions = iter(
            sorted(predictions, key=lambda each: (each.error is not None, -each.uncertainty))
        )
    yield from predictions


def _keep_embeddings(predictions: Iterable[Prediction], path: Path) -> Iterator[Prediction]:
    """Yield predictions, and write their features into a file after the last one."""
    # only paths and features are kept until the end, not the predictions
    paths = []
    features = []
    for prediction in predictions:
        if prediction.features is not None:
            paths.append(prediction.path)
            features.append(prediction.features)
        yield prediction
    _save_embeddings(path, paths, features)


def predict_images(
    bundle: Bundle,
    images: ImageInputs,
    *,
    top_k: int = 5,
    coverage: float = 0.95,
    batch_size: int = 64,
    precision: str = "auto",
    tta: str = "none",
    with_features: bool = False,
    similar: int = 0,
) -> Iterator[Prediction]:
    """Yield a prediction for each image, in order.

    Args:
        bundle: The model, on its device.
        images: See `predict`; so are `top_k`, `coverage`, `batch_size`, `precision`, `tta` and
            `similar`.
        with_features: Add the pooled features to each prediction.
    """
    predictor = Predictor(
        bundle,
        top_k=top_k,
        coverage=coverage,
        batch_size=batch_size,
        precision=precision,
        tta=tta,
        embeddings=with_features,
        similar=similar,
    )
    yield from predictor.predict_items(_name_images(images))


def _name_images(images: ImageInputs) -> Iterator[tuple[str, str | Image.Image]]:
    """Yield the name of each image, and its path or the image in memory."""
    for number, image in enumerate(list_images(images)):
        yield image if isinstance(image, str) else f"image {number}", image


def _save_embeddings(path: Path, names: Sequence[str], features: Sequence[Float32s]) -> None:
    """Write features: .npz with `paths` [N] and `embeddings` [N, D], or .parquet with the columns
    path and embedding."""
    paths = [printable(name) for name in names]

    def write(temporary: Path) -> None:
        if path.suffix == ".npz":
            arrays = {"paths": np.array(paths, dtype=str), "embeddings": np.array(features)}
            save_arrays(temporary, arrays)
            return
        # pyarrow comes with the extra "datasets"
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        pq.write_table(pa.table({"path": paths, "embedding": features}), temporary)

    write_atomically(path, write)


def _check_embeddings_file(path: Path) -> None:
    """Check the file that features go into, before they are computed.

    Raises:
        ValueError: The suffix is neither .npz nor .parquet, or pyarrow is missing for the latter.
    """
    if path.suffix not in (".npz", ".parquet"):
        raise ValueError(f"--embeddings {path} ends neither in .npz nor in .parquet")
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ValueError(
            "--embeddings FILE.parquet needs pyarrow: pip install '.[datasets]' in the clone of vit;"
            " .npz needs nothing"
        )
