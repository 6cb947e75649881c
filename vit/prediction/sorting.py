"""Copies of photos in a folder for each class, or for each note of a prediction."""

import filecmp
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from vit.bundle import Bundle
from vit.data.images import ImageInputs
from vit.prediction.conformal import read_threshold
from vit.prediction.records import Prediction
from vit.runtime.files import clean_name, write_atomically

# folder of photos without any label
_NO_LABEL = "no label"


class PhotoSorter:
    """Copy photos into folders. No file is ever overwritten.

    Args:
        directory: Parent of the folders; each is made with its first photo.
        bundle: The model.

    Raises:
        ValueError: The model has no prediction sets.
    """

    def __init__(self, directory: Path, bundle: Bundle) -> None:
        is_decided = bundle.is_multilabel or bool(bundle.operating_point)
        if not is_decided and read_threshold(bundle) is None:
            raise ValueError(
                f"photos can't be sorted: {bundle.name} holds no thresholds of prediction sets; `vit"
                " train` writes them into the model file if there are 19 validation images"
            )
        self.directory = directory
        names = name_folders(bundle.class_names)
        self.folders = dict(zip(bundle.class_names, names, strict=True))

    def check(self, images: ImageInputs) -> None:
        """Check that the directory is outside the folders of the images. Otherwise a second run
        would sort its own copies.

        Raises:
            ValueError: It is inside one.
        """
        if isinstance(images, str | Path):
            images = [images]
        if not isinstance(images, Sequence):
            return
        for name in images:
            is_folder = isinstance(name, str | Path) and os.path.isdir(name)
            if is_folder and self.directory.resolve().is_relative_to(Path(str(name)).resolve()):
                raise ValueError(
                    f"--sort-into {self.directory} is inside the photos, {name}; choose another"
                )

    def choose_folders(self, prediction: Prediction) -> list[str]:
        """Return the names of the folders for a photo: its note, or without one its class or each of
        its labels."""
        if prediction.note:
            return [prediction.note]
        if prediction.labels is not None:
            return [self.folders[name] for name in prediction.labels] or [_NO_LABEL]
        if prediction.prediction_set is None:
            return [self.folders[prediction.classes[0][1]]]
        return [self.folders[prediction.prediction_set[0]]]

    def copy(self, prediction: Prediction) -> Prediction:
        """Copy the photo of a prediction, unless it can't be read, and return the prediction.

        Raises:
            OSError: The photo can't be copied.
        """
        source = Path(prediction.path)
        if prediction.error is not None or not source.is_file():
            return prediction
        # a name may come from a system with other rules
        stem, suffix = clean_name(source.stem), clean_name(source.suffix[1:])
        for name in self.choose_folders(prediction):
            folder = self.directory / name
            folder.mkdir(parents=True, exist_ok=True)
            number, target = 1, folder / f"{stem}.{suffix}"
            while os.path.lexists(target) and not _is_copy(target, source):
                # another photo has that name
                number += 1
                target = folder / f"{stem}-{number}.{suffix}"
            if not target.exists():
                # a program that is killed leaves no half photo under its name
                write_atomically(target, lambda file: shutil.copyfile(source, file))
        return prediction


def _is_copy(target: Path, source: Path) -> bool:
    """Return whether a file is a copy of a photo, from an earlier run."""
    is_file = target.is_file() and not target.is_symlink()
    return is_file and filecmp.cmp(source, target, shallow=False)


def name_folders(class_names: Sequence[str]) -> list[str]:
    """Return a valid folder name for each class; they differ from one another and from the folders of
    notes, even if case is ignored."""
    taken = {"unsure", "unusual", _NO_LABEL}  # the notes of `Prediction.note`
    names = []
    for class_name in class_names:
        clean = clean_name(class_name)
        name, number = clean, 1
        while name.casefold() in taken:
            number += 1
            name = f"{clean}-{number}"
        taken.add(name.casefold())
        names.append(name)
    return names
