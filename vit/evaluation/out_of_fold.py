"""Out-of-fold logits of a cross-validated run: each image is predicted by a model that has seen
neither it nor its group. `vit evaluate RUN` measures them as it measures a test split."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vit.bundle import Bundle
from vit.evaluation.images import EvaluationSet
from vit.prediction.probabilities import Float32s, Ints
from vit.runtime.files import read_arrays, write_arrays
from vit.runtime.metrics_file import OUT_OF_FOLD_FILE

# name of the split in an evaluation
CROSS_VALIDATION = "cross-validation"


@dataclass(frozen=True)
class OutOfFold:
    """Predictions of the images that were left out once.

    Attributes:
        ids: Name of each image, as text that any file can hold, [n].
        digests: Hash of its pixels, uint64 [n]. See `ImageDataset.digests`.
        folds: Number of the fold that left it out, [n].
        logits: [n, C].
    """

    ids: np.ndarray[Any, Any]
    digests: np.ndarray[Any, Any]
    folds: Ints
    logits: Float32s

    def save(self, directory: Path) -> None:
        """Write the file into a run's directory."""
        write_arrays(directory / OUT_OF_FOLD_FILE, vars(self))

    def select(self, images: EvaluationSet) -> EvaluationSet:
        """Return these images out of the training images, in this order.

        Raises:
            ValueError: One is missing or has changed.
        """
        position = {name: index for index, name in enumerate(images.ids)}
        chosen = np.array([position.get(name, -1) for name in self.ids.tolist()])
        if (chosen < 0).any() or (images.dataset.digests[chosen] != self.digests).any():
            raise ValueError(
                "the images have changed since the run was cross-validated; train it again, or name"
                " other images with --data"
            )
        dataset = replace(images.dataset.subset(chosen), split=CROSS_VALIDATION)
        labels = images.labels[chosen]
        return replace(images, dataset=dataset, ids=tuple(self.ids.tolist()), labels=labels)

    def describe(self) -> str:
        """Return what a reader should know about these predictions."""
        count = len(np.unique(self.folds))
        return (
            f"each image is predicted by a linear probe of the other {count - 1} of {count} folds,"
            " which has seen neither it nor its group; the model itself is trained on all images;"
            " intervals may be a little too narrow, because the probes share training images"
            " (Bates, Hastie & Tibshirani 2021)"
        )


def load_out_of_fold(bundle: Bundle) -> OutOfFold | None:
    """Return the predictions beside a model file; None if its run wasn't cross-validated.

    Raises:
        ValueError: They are damaged, or of another model.
    """
    path = Path(bundle.name)
    path = (path if path.is_dir() else path.parent) / OUT_OF_FOLD_FILE
    if not path.is_file():
        return None
    try:
        found = OutOfFold(**read_arrays(path))
    except TypeError as error:
        raise ValueError(f"{path} is damaged; train the run again") from error
    shape = (len(found.ids), len(bundle.class_names))
    if found.logits.shape != shape or not len(found.digests) == len(found.folds) == shape[0]:
        raise ValueError(f"{path} is of another model; train the run again")
    return found
