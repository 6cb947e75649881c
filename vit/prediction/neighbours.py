"""Nearest neighbours by the cosine of pooled features."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vit.bundle import Bundle
from vit.model.model_file import NUM_NEIGHBOURS
from vit.prediction.probabilities import Float32s, Floats, Ints

Features = NDArray[np.floating[Any]]
# cosines computed at once: 32 MiB
_BLOCK = 1 << 23


@dataclass(frozen=True)
class Similar:
    """A training image that is similar to an image.

    Attributes:
        path: Its name within the data set.
        class_name: Its class; empty if images may have several labels.
        similarity: Cosine of the two images' features, -1 to 1.
    """

    path: str
    class_name: str
    similarity: float


def find_nearest(
    features: Features,
    references: Features,
    count: int,
    *,
    skip_self: bool = False,
    one_by_one: bool = False,
) -> tuple[Ints, Float32s]:
    """Find for each row of `features` the rows of `references` with the largest cosine.

    Args:
        features: [n, D].
        references: [m, D].
        count: Number of neighbours k; m where there are fewer.
        skip_self: Both are the same images, and none is its own neighbour.
        one_by_one: Compute each row by itself, so that its last bits don't depend on the others;
            for few rows.

    Returns:
        Indices and cosines of the neighbours, [n, k] each, the nearest first.
    """
    units = normalize_rows(references)
    # The same array on both sides, so that BLAS can compute a symmetric product.
    queries = units if skip_self else normalize_rows(features)
    count = min(count, len(units) - skip_self)
    rows = max(1, _BLOCK // len(units))
    indices = []
    nearest_cosines = []
    # at least one block: without images the result is empty
    for start in range(0, max(len(queries), 1), rows):
        block = queries[start : start + rows]
        if one_by_one and len(block):
            cosines = np.stack([units @ query for query in block])
        else:
            cosines = block @ units.T
        if skip_self:
            # below any cosine
            np.fill_diagonal(cosines[:, start:], -2)
        # partitioned before sorting, because sorting all cosines takes longer
        nearest = np.sort(np.argpartition(-cosines, count - 1, axis=1)[:, :count], axis=1)
        values = np.take_along_axis(cosines, nearest, axis=1)
        # a stable order: equal cosines stay in the order of the references
        order = np.argsort(-values, axis=1, kind="stable")
        indices.append(np.take_along_axis(nearest, order, axis=1))
        nearest_cosines.append(np.take_along_axis(values, order, axis=1))
    return np.concatenate(indices), np.concatenate(nearest_cosines)


def compute_distances(features: Features, training_features: Features) -> Floats:
    """Compute the distance of each image to its k-th nearest training image.

    Features are scaled to length one (Sun, Ming, Zhu & Li 2022, "Out-of-distribution detection with
    deep nearest neighbors").

    Args:
        features: [n, D].
        training_features: [m, D].

    Returns:
        [n], 0 to 2.
    """
    _, cosines = find_nearest(features, training_features, NUM_NEIGHBOURS, one_by_one=True)
    return convert_to_distances(cosines[:, -1])


def convert_to_distances(cosines: Float32s) -> Floats:
    """Return distances between vectors of length one: |a - b|² = 2 - 2 a·b."""
    return np.sqrt(np.maximum(2 - 2 * cosines, 0)).astype(np.float64)


def find_similar(
    bundle: Bundle,
    features: Float32s,
    count: int,
    *,
    class_index: int | None = None,
) -> list[list[Similar]]:
    """Find the training images that are most similar to each image, by the cosine of the features.

    Args:
        bundle: The model, whose file holds features of at most 2,000 training images.
        features: [n, D].
        count: Number of training images for each image.
        class_index: Class of the training images; None: any.

    Returns:
        For each image at most `count`, the most similar first.
    """
    check_similar(bundle)
    assert bundle.likeness is not None
    images = bundle.metadata["conformal"]["training_images"]
    training_features = bundle.likeness.training_features
    if class_index is not None:
        chosen = [index for index, (_, label) in enumerate(images) if label == class_index]
        images = [images[index] for index in chosen]
        training_features = training_features[chosen]
    if not images:
        return [[] for _ in features]
    indices, cosines = find_nearest(features, training_features, count, one_by_one=True)
    return [
        [
            _name_similar(bundle, images[index], cosine)
            for index, cosine in zip(*neighbours, strict=True)
        ]
        for neighbours in zip(indices.tolist(), cosines.tolist(), strict=True)
    ]


def _name_similar(bundle: Bundle, image: tuple[str, int], cosine: float) -> Similar:
    path, label = image
    return Similar(path, bundle.class_names[label] if label >= 0 else "", cosine)


def check_similar(bundle: Bundle) -> None:
    """Check that a model file names training images.

    Raises:
        ValueError: It names none.
    """
    recorded = bundle.metadata.get("conformal", {})
    names = recorded.get("training_images")
    if bundle.likeness is not None and names:
        return
    reason = recorded.get("no_likeness")
    if reason is None:
        reason = "`vit train` writes them into the model file if there are validation images"
    elif not reason:
        reason = "its file holds features, but no names"
    raise ValueError(f"{bundle.name} names no training images: {reason}")


def normalize_rows(features: Features) -> Float32s:
    """Scale rows to length one, float32; zeros stay zeros."""
    rows = features.astype(np.float32)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(lengths, 1e-12))
