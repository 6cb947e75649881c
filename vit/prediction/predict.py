"""Class probabilities and features of any images: `vit.predict` and `vit.embed`."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from vit.bundle import ModelLike, Models, keeps_mode, open_model
from vit.data.images import ImageInputs, list_images
from vit.data.sources.tables import is_table, list_rows
from vit.model.logits import count_features
from vit.prediction.batch_predictor import BatchPredictor, Pixels, read_from
from vit.prediction.predictor import Predictor, decode_batches
from vit.prediction.probabilities import Float32s
from vit.prediction.records import Prediction, PredictionResult, write_output
from vit.runtime.arguments import check_minimum
from vit.runtime.documents import escape_formula
from vit.runtime.files import expand_home


@keeps_mode
def predict(
    model: Models,
    images: ImageInputs,
    *,
    classes: str | Sequence[str] = (),
    top_k: int = 5,
    columns: Literal["answers", "classes"] = "answers",
    output: str | Path | None = None,
    resume: bool = False,
    batch_size: int = 64,
    device: str = "auto",
    precision: str = "auto",
) -> PredictionResult:
    """Predict the most probable classes of images.

    Args:
        model: See `vit.evaluate`.
        images: Files, folders, PIL images, uint8 arrays [H, W, 3] or
            [n, H, W, 3], or one of them; also tables that name images, and
            data sets in Python. Labels aren't needed.
        classes: The only classes that can occur, such as cat,dog, which share
            the probability; or labels. None: all.
        top_k: Classes for each image.
        columns: Columns of FILE.csv: answers, or classes: the image as its
            table names it, and the probability of each class.
        output: File to write as predictions are made: FILE.jsonl or FILE.csv.
            The result then holds no predictions.
        resume: Go on with the `output` of a command that was stopped, JSON
            lines: no image is predicted twice. The model, images and options
            must be the same.
        batch_size: Images at a time.
        device: See `vit.evaluate`.
        precision: See `vit.evaluate`.

    Returns:
        The result: `.predictions` in the order of the images. An image that
        can't be read has an `error` instead of classes. Where an image may
        have several labels, `.labels` has those it is predicted to have.

    Raises:
        ValueError: The model can't be opened, or an input is not an image.

    Example:
        >>> result = vit.predict("runs/digits", "photo.png", top_k=3)
        >>> result.predictions[0].classes  # [(index, name, probability), …]
    """
    predictions = iterate_predictions(
        model,
        images,
        output=output,
        resume=resume,
        columns=columns,
        classes=classes,
        top_k=top_k,
        batch_size=batch_size,
        device=device,
        precision=precision,
    )
    return PredictionResult([each for each in predictions if output is None])


def list_inputs(images: ImageInputs) -> Iterator[tuple[str, str | Image.Image]]:
    """Yield the name of each image, and its path or the upright image, as they are needed. Raises
    ValueError or OSError for a single folder without images, or a table."""
    listed: Iterable[str | Image.Image] = _list_one(images)
    if isinstance(images, list | tuple):
        # in a list, reading a folder says why it has no images
        listed = chain.from_iterable(_list_one(each, in_list=True) for each in images)
    for number, image in enumerate(listed):
        yield (image if isinstance(image, str) else f"image {number}"), image


def _list_one(images: ImageInputs, *, in_list: bool = False) -> Iterator[str | Image.Image]:
    """List the images that a table names, or those of `list_images`."""
    if isinstance(images, str | Path) and is_table(expand_home(images)):
        return (file for _, file in list_rows(expand_home(images))[1])
    return list_images([images] if in_list else images)


def iterate_predictions(
    model: Models,
    images: ImageInputs,
    *,
    output: str | Path | None = None,
    resume: bool = False,
    columns: str = "answers",
    **options: Any,
) -> Iterator[Prediction]:
    """Yield the predictions of `predict`, for any number of images: one batch is in memory."""
    if resume and output is None:
        raise ValueError("--resume goes on in a file; name it with --output")
    items, predictor = list_inputs(images), Predictor(model, **options)
    header: list[str] = []
    if columns == "classes":
        if Path(output or "").suffix != ".csv":
            raise ValueError("--columns classes writes a table; name it with --output FILE.csv")
        header = ["path", *predictor.bundle.class_names]
        if isinstance(images, str | Path) and is_table(expand_home(images)):
            header[0], items = list_rows(expand_home(images))
        else:
            items = ((escape_formula(name), image) for name, image in items)
    if output is None:
        yield from predictor.predict_items(items)
    else:
        yield from write_output(output, items, predictor.predict_items, header, resume=resume)


@keeps_mode
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
    check_minimum(1, batch_size=batch_size)
    bundle = open_model(model, device=device)
    predictor = BatchPredictor.from_bundle(bundle, batch_size=batch_size, precision=precision)
    features = [np.zeros((0, count_features(bundle.model)), dtype=np.float32)]
    for batch in decode_batches(list_inputs(images), predictor.preprocess, batch_size):
        pixels: list[Pixels] = []
        for path, decoded in batch:
            if isinstance(decoded, str):
                raise ValueError(f"{path} has no features: {decoded}")
            pixels.append(decoded)
        _, found = predictor.predict_with_features(read_from(pixels), count=len(pixels))
        features.append(found)
    return np.concatenate(features)
