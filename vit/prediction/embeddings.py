"""Pooled features of images, for whoever looks for neighbours, clusters or a classifier of their own."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vit.bundle import Bundle
from vit.data.dataset import printable
from vit.data.listing import ImageInputs
from vit.model.logits import count_features
from vit.prediction.predictor import Prediction, predict_images
from vit.runtime.files import write_atomically


def embed_images(
    bundle: Bundle, images: ImageInputs, *, batch_size: int = 64, precision: str = "auto"
) -> NDArray[np.float32]:
    """The pooled features [N, D] that the model's head reads. Arguments as of `predict_images`.
    Raises ValueError for an image that can't be read."""
    predictions = predict_images(
        bundle, images, top_k=1, batch_size=batch_size, precision=precision, with_features=True
    )
    features = []
    for prediction in predictions:
        if prediction.features is None:
            raise ValueError(f"{prediction.path} has no features: {prediction.error}")
        features.append(prediction.features)
    if not features:
        return np.zeros((0, count_features(bundle.model)), dtype=np.float32)
    return np.stack(features)


def save_embeddings(path: Path, predictions: Sequence[Prediction]) -> None:
    """Write the features of predictions: .npz with `paths` [N] and `embeddings` [N, D], or .parquet
    with the columns path and embedding. Images that can't be read are left out. Raises ValueError
    as `check_embeddings_file`."""
    check_embeddings_file(path)
    paths = []
    features = []
    for prediction in predictions:
        if prediction.features is not None:
            paths.append(printable(prediction.path))
            features.append(prediction.features)

    def write(temporary: Path) -> None:
        if path.suffix == ".npz":
            # of an open file the name gets no suffix
            with temporary.open("wb") as file:
                np.savez(file, paths=np.array(paths, dtype=str), embeddings=np.array(features))
            return
        import pyarrow as pa  # type: ignore[import-untyped]  # of the extra "datasets"
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        pq.write_table(pa.table({"path": paths, "embedding": features}), temporary)

    write_atomically(path, write)


def check_embeddings_file(path: Path) -> None:
    """Raise ValueError for a suffix that is neither .npz nor .parquet, or .parquet without
    pyarrow."""
    if path.suffix not in (".npz", ".parquet"):
        raise ValueError(f"--embeddings {path} ends neither in .npz nor in .parquet")
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ValueError(
            "--embeddings FILE.parquet needs pyarrow: pip install 'vit-pipeline[datasets]';"
            " .npz needs nothing"
        )
