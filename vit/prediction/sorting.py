"""Copies of photos in a folder for each class, or for each note of a prediction."""

import filecmp
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from vit.bundle import Bundle
from vit.data.images import ImageInputs
from vit.prediction.conformal import explain_missing, read_threshold
from vit.prediction.records import Prediction
from vit.runtime.files import clean_name, open_regular

# folder of photos without any label
_NO_LABEL = "no label"


class PhotoSorter:
    """Copy photos into folders. No file is ever overwritten.

    Args:
        directory: Parent of the folders; each is made with its first photo.
        bundle: The model.
        coverage: Coverage of the prediction sets.

    Raises:
        ValueError: The model has no prediction sets.
    """

    def __init__(self, directory: Path, bundle: Bundle, *, coverage: float) -> None:
        is_decided = bundle.is_multilabel or bool(bundle.operating_point)
        if not is_decided and read_threshold(bundle.metadata, coverage) is None:
            raise ValueError(f"photos can't be sorted: {explain_missing(bundle, coverage)}")
        self.directory = directory
        names = name_folders(bundle.class_names, [_NO_LABEL] if bundle.is_multilabel else [])
        self.folders = dict(zip(bundle.class_names, names, strict=True))

    def check(self, images: ImageInputs) -> None:
        """Check that the directory is outside the folders of the images. Otherwise a second run
        would sort its own copies.

        Raises:
            ValueError: It is inside one.
        """
        named = [images] if isinstance(images, str | Path) else images
        if not isinstance(named, Sequence):
            return
        for name in named:
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
        stem = clean_name(source.stem)
        suffix = clean_name(source.suffix[1:])
        for name in self.choose_folders(prediction):
            folder = self.directory / name
            folder.mkdir(parents=True, exist_ok=True)
            number = 1
            target = folder / f"{stem}.{suffix}"
            while not _copy_new(source, target):
                # another photo has that name
                number += 1
                target = folder / f"{stem}-{number}.{suffix}"
        return prediction


def name_folders(class_names: Sequence[str], reserved: Sequence[str] = ()) -> list[str]:
    """Return a valid folder name for each class, none of them `reserved`; they differ even if case is
    ignored."""
    taken = {"unsure", "unusual", *reserved}  # the notes of `Prediction.note`
    names = []
    for class_name in class_names:
        clean = clean_name(class_name)
        name = clean
        number = 1
        while name.casefold() in taken:
            number += 1
            name = f"{clean}-{number}"
        taken.add(name.casefold())
        names.append(name)
    return names


def _copy_new(source: Path, target: Path) -> bool:
    """Copy a file, unless another one is there; return whether the target now has its content. A
    file with the same content, from an earlier run, counts as a copy."""
    if target.is_symlink():
        return False
    if target.exists():
        return target.is_file() and filecmp.cmp(source, target, shallow=False)

    # A program that is killed must not leave half a photo under its name.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open_regular(source) as content, temporary.open("xb") as copy:
            shutil.copyfileobj(content, copy)
        try:
            # fails if anything is there now, even a link
            os.link(temporary, target)
        except FileExistsError:
            return _copy_new(source, target)
        except OSError:  # The file system has no hard links.
            temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)
    return True
