"""Class probabilities and features of any images: `vit.predict` and `vit.embed`."""

import importlib.util
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from vit.bundle import Bundle, ModelLike, keeps_mode, open_model, require_classifier
from vit.data.dataset import printable
from vit.data.images import ImageInputs, list_images, read_image
from vit.data.preprocess import Preprocess
from vit.model.logits import count_features
from vit.prediction.conformal import predict_p_values, predict_sets, read_threshold
from vit.prediction.decision import decide_classes, measure_uncertainty
from vit.prediction.ensemble import Ensemble, average_logits, list_members, open_models
from vit.prediction.labels import compute_probabilities, find_labels
from vit.prediction.neighbours import check_similar, find_similar
from vit.prediction.predictor import TTA, Pixels, Predictor, read_from
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
    predictor = Predictor.from_bundle(bundle, batch_size=batch_size, precision=precision)
    features = [np.zeros((0, count_features(bundle.model)), dtype=np.float32)]
    for batch in _decode_batches(images, [predictor.preprocess], batch_size):
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
    # a wrong option is reported before the first photo is read
    read_threshold(bundle.metadata, coverage)
    if isinstance(bundle, Ensemble) and (similar or with_features):
        raise ValueError("similar and embeddings are features of one model; name one")
    if similar:
        check_similar(bundle)
    predictors = [
        Predictor.from_bundle(member, batch_size=batch_size, precision=precision, tta=tta)
        for member in list_members(bundle)
    ]
    names = bundle.class_names

    def predict_batch(
        paths: Sequence[str], pixels: Sequence[Sequence[Pixels]]
    ) -> Iterator[Prediction]:
        count = len(paths)
        # the images as each model sees them
        reads = [read_from([each[place] for each in pixels]) for place in range(len(predictors))]
        # features are computed only if something needs them: some models have none
        features = None
        if isinstance(bundle, Ensemble):
            logits = average_logits(
                bundle,
                [
                    predictor.predict(read, count=count)
                    for predictor, read in zip(predictors, reads, strict=True)
                ],
            )
        elif bundle.likeness is None and not with_features:
            logits = predictors[0].predict(reads[0], count=count)
        else:
            logits, features = predictors[0].predict_with_features(reads[0], count=count)
        # the temperature changes probabilities, but neither the order of classes nor the sets
        probabilities = compute_probabilities(bundle, logits)
        sets = predict_sets(bundle, logits, coverage=coverage)
        p_values = predict_p_values(bundle, features)
        neighbours = None
        if similar and features is not None:
            neighbours = find_similar(bundle, features, similar)
        order = probabilities.copy()
        if bundle.operating_point and not bundle.is_multilabel:
            # the predicted class comes first, whatever its probability
            order[np.arange(len(order)), decide_classes(bundle, probabilities)] = np.inf
        uncertainties = measure_uncertainty(bundle, probabilities).tolist()
        for row, path in enumerate(paths):
            # a stable order: of equally probable classes the first one comes first
            best = np.argsort(-order[row], kind="stable")[:top_k].tolist()
            yield Prediction(
                path,
                [(index, names[index], float(probabilities[row, index])) for index in best],
                labels=find_labels(bundle, probabilities[row]),
                prediction_set=None if sets is None else [names[index] for index in sets[row]],
                p_value=None if p_values is None else p_values[row],
                features=features[row] if with_features and features is not None else None,
                similar=None if neighbours is None else neighbours[row],
                is_decided=bundle.is_multilabel or bool(bundle.operating_point),
                uncertainty=uncertainties[row],
            )

    preprocesses = [predictor.preprocess for predictor in predictors]
    for batch in _decode_batches(images, preprocesses, batch_size):
        readable = [(path, pixels) for path, pixels in batch if not isinstance(pixels, str)]
        predictions = predict_batch(
            [path for path, _ in readable], [pixels for _, pixels in readable]
        )
        for path, pixels in batch:
            if isinstance(pixels, str):
                yield Prediction(path, [], error=pixels)
            else:
                yield next(predictions)


def _decode_batches(
    images: ImageInputs, preprocesses: Sequence[Preprocess], batch_size: int
) -> Iterator[list[tuple[str, list[Pixels] | str]]]:
    """Yield the images in batches, each with its path, and its pixels as each model sees it or why
    it can't be read."""
    numbered = enumerate(list_images(images))
    # decoding a photo may take longer than its forward pass; more threads than cores would only
    # keep more large photos in memory
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 32)) as pool:
        while batch := list(islice(numbered, batch_size)):
            decoded = pool.map(lambda pair: _decode(pair[1], preprocesses), batch)
            paths = [
                image if isinstance(image, str) else f"image {number}" for number, image in batch
            ]
            yield list(zip(paths, decoded, strict=True))


def _decode(image: str | Image.Image, preprocesses: Sequence[Preprocess]) -> list[Pixels] | str:
    """Return the image as each model sees it, uint8 [H, W, 3], or why it can't be read."""
    try:
        opened = read_image(Path(image)) if isinstance(image, str) else image
        return [preprocess.to_uint8(opened) for preprocess in preprocesses]
    except (OSError, ValueError) as error:
        # without the path, which the prediction already names
        return getattr(error, "strerror", None) or str(error)


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
