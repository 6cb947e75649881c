"""Predictions of images as arrays. `vit evaluate` writes them for `vit compare`; a run of
`vit train --folds` writes those of each image by a model that has seen neither it nor its group,
and `vit evaluate RUN` measures them like a test split."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vit.data.dataset import ImageDataset, printable
from vit.prediction.probabilities import Bools, Float32s
from vit.runtime.files import read_arrays, write_arrays

if TYPE_CHECKING:
    # `vit compare` does without torch.
    from vit.evaluation.metrics import Scores

PREDICTIONS_FILE = "predictions.npz"
# name of the split of a run of `vit train --folds` in an evaluation
CROSS_VALIDATION = "cross-validation"


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions of n images of C classes or labels.

    Attributes:
        ids: Name of each image, as text that any file can hold, [n].
        digests: Hash of its pixels, uint64 [n]. See `ImageDataset.digests`.
        groups: Its group, as text, [n]; its name if it is its own group.
        labels, predicted: Its class, [n], or which labels it has, bool [n, C]; and the predicted.
        logits: [n, C].
    """

    ids: NDArray[Any]
    digests: NDArray[Any]
    groups: NDArray[Any]
    labels: NDArray[Any]
    predicted: NDArray[Any]
    logits: Float32s

    @property
    def correct(self) -> Bools:
        """True for an image whose class, or of which every label, is right, [n]."""
        is_equal = self.labels == self.predicted
        return np.asarray(is_equal.reshape(len(self.ids), -1).all(axis=1))


def save_predictions(path: Path, dataset: ImageDataset, scores: "Scores", logits: Float32s) -> None:
    """Write the predictions of decoded images."""
    ids, groups = (
        np.array([printable(name) for name in names], dtype=str)
        for names in (dataset.ids, dataset.groups or dataset.ids)
    )
    answers = (scores.labels, scores.predicted)
    write_arrays(path, vars(Predictions(ids, dataset.digests, groups, *answers, logits)))


def load_predictions(directory: Path, num_classes: int) -> Predictions | None:
    """Return the predictions in the directory of a run or an evaluation; None if it has none.
    Raises ValueError if they are damaged, or of another model."""
    path = directory / PREDICTIONS_FILE
    if not path.is_file():
        return None
    arrays = read_arrays(path)
    names = set(Predictions.__annotations__)
    if arrays.keys() != names or arrays["logits"].shape != (len(arrays["ids"]), num_classes):
        raise ValueError(f"{path} is damaged, or of another model; make it again")
    return Predictions(**arrays)
