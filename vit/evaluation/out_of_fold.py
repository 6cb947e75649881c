"""Out-of-fold logits of a cross-validated run: each image is predicted by a model that has seen
neither it nor its group. `vit evaluate RUN` measures them as it measures a test split."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vit.bundle import Bundle
from vit.data.dataset import printable
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
        ids: Name of each image, as text that any file can hold.
        digests: Hash of its pixels, uint64 [n]. See `ImageDataset.digests`.
        folds: Number of the fold that left it out, [n].
        logits: [n, C].
    """

    ids: tuple[str, ...]
    digests: np.ndarray
    folds: Ints
    logits: Float32s

    def save(self, directory: Path) -> None:
        """Write the file into a run's directory."""
        arrays = {
            "ids": np.array(self.ids, dtype=str),
            "digests": self.digests,
            "folds": self.folds,
            "logits": self.logits,
        }
        write_arrays(directory / OUT_OF_FOLD_FILE, arrays)

    def select(self, images: EvaluationSet) -> EvaluationSet:
        """Return these images out of the training images, in this order.

        Raises:
            ValueError: One is missing or has changed.
        """
        position = {name: index for index, name in enumerate(images.ids)}
        indices = [position.get(name, -1) for name in self.ids]
        chosen = np.array(indices)
        if (chosen < 0).any() or (images.dataset.digests[chosen] != self.digests).any():
            raise ValueError(
                "the images have changed since the run was cross-validated; train it again, or name"
                " other images with --data"
            )
        dataset = replace(images.dataset.subset(chosen), split=CROSS_VALIDATION)
        return replace(images, dataset=dataset, ids=self.ids, labels=images.labels[chosen])

    def describe(self, images: EvaluationSet) -> list[str]:
        """Return what a reader should know, in sentences.

        Args:
            images: All training images.
        """
        count = len(np.unique(self.folds))
        notes = [
            f"each image is predicted by a linear probe of the other {count - 1} of {count} folds,"
            " which has seen neither it nor its group; the model itself is trained on all images",
            "intervals are those of a test split, by group; they leave out that the probes share"
            " training images, and may be a little too narrow (Bates, Hastie & Tibshirani 2021)",
        ]
        num_left = len(images) - len(self.ids)
        if num_left:
            notes.append(
                f"{num_left:,} images are always trained on and not measured, because their class"
                " has one group or image"
            )
        return notes


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
        arrays = read_arrays(path)
        ids = tuple(map(printable, arrays["ids"].tolist()))
        found = OutOfFold(ids, arrays["digests"], arrays["folds"], arrays["logits"])
        num_classes = found.logits.shape[1]
    except (KeyError, IndexError) as error:
        raise ValueError(f"{path} is damaged; train the run again") from error
    if num_classes != len(bundle.class_names) or not (
        len(ids) == len(found.digests) == len(found.folds) == len(found.logits)
    ):
        raise ValueError(f"{path} is of another model; train the run again")
    return found
