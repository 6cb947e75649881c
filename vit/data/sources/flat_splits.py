"""Splits whose images lie in one folder, with their classes in a text file: val/ of ImageNet and
Tiny ImageNet as they are downloaded."""

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit.data.images import is_image_name, list_files
from vit.data.sources.base import relative_path
from vit.runtime.arguments import shorten
from vit.runtime.files import read_text

# names of the file in or beside the folder, "{}" for the folder's name
_NEAR = (
    "{}_annotations.txt",
    "{}_labels.txt",
    "{}_labels.csv",
    "{}_map.txt",
    "{}_list.txt",
    "{}.txt",
    "{}.csv",
    "labels.txt",
    "labels.csv",
)
# names of the file in any folder up to three levels above, too
_ABOVE = (
    "LOC_{}_solution.csv",
    "imagenet_2012_validation_synset_labels.txt",
    "ILSVRC2012_validation_ground_truth.txt",
)
_WORDNET_ID = re.compile(r"n\d{8}")


class FlatSplit(NamedTuple):
    """The images of a flat folder that have a class.

    Attributes:
        paths: Their paths, relative to the root.
        labels: Their classes.
        source: The file with the classes.
        num_others: Number of the other images, which are of classes without training images.
    """

    paths: list[str]
    labels: list[str]
    source: Path
    num_others: int

    def list_images(self, class_names: Sequence[str]) -> tuple[list[str], np.ndarray]:
        """List the images of some classes: their paths, and their labels [n], places in
        `class_names`."""
        number_of = {name: number for number, name in enumerate(class_names)}
        pairs = zip(self.paths, self.labels, strict=True)
        chosen = [(path, number_of[label]) for path, label in pairs if label in number_of]
        labels = np.array([number for _, number in chosen], dtype=np.int64)
        return [path for path, _ in chosen], labels


def read_flat_split(folder: Path, root: Path, class_names: Collection[str]) -> FlatSplit | None:
    """Read the classes of the images in a flat folder.

    Args:
        folder: The folder.
        root: Folder that the paths are relative to.
        class_names: The classes that training images have.

    Returns:
        The images; None if no file has their classes.

    Raises:
        ValueError: The file doesn't fit the images.
    """
    source = _find_source(folder)
    if source is None:
        return None
    files = [file for file in list_files(folder, left_out=[]) if is_image_name(file)]
    paths = [relative_path(file, root) for file in files]
    rows = _read_rows(source)
    if all(len(row) == 1 for row in rows):
        # a class a line, in the order of the names
        if len(rows) != len(paths):
            text = f"{source} has {len(rows):,} lines, and {folder} {len(paths):,} images"
            raise ValueError(f"{text}; take the file that belongs to them")
        by_name = {_stem(path): row[0] for path, row in zip(sorted(paths), rows, strict=True)}
    else:
        by_name = {_stem(row[0]): row[1] for row in rows if len(row) > 1}

    labels = [by_name.get(_stem(path)) for path in paths]
    missing = [path for path, label in zip(paths, labels, strict=True) if label is None]
    if missing:
        text = f"{source} has no class for {len(missing):,} images, such as {missing[0]}"
        raise ValueError(f"{text}; add them, or move them away")
    named = _name_classes([label for label in labels if label is not None], class_names, source)
    known = set(class_names)
    chosen = [(path, label) for path, label in zip(paths, named, strict=True) if label in known]
    if not chosen:
        text = f"{source} names classes such as {named[0]!r}, and no folder of training images"
        raise ValueError(f"{text} has these names; take the file that belongs to them")
    return FlatSplit(
        [path for path, _ in chosen],
        [label for _, label in chosen],
        source,
        len(paths) - len(chosen),
    )


def _find_source(folder: Path) -> Path | None:
    parents = folder.absolute().parents[:4]
    places = [
        *(place / name for name in _NEAR for place in (folder, folder.parent)),
        *(place / name for name in _ABOVE for place in (folder, *parents)),
    ]
    for place in places:
        path = place.with_name(place.name.format(folder.name))
        if path.is_file():
            return path
    return None


def _read_rows(source: Path) -> list[list[str]]:
    lines = (line.strip() for line in read_text(source).removeprefix("\ufeff").splitlines())
    return [re.split(r'[\s,;"]+', line.strip('"')) for line in lines if line]


def _stem(path: str) -> str:
    name = os.path.basename(path)
    return os.path.splitext(name)[0] if is_image_name(name) else name


def _name_classes(
    labels: Sequence[str], class_names: Collection[str], source: Path
) -> Sequence[str]:
    """Return the names of classes that are written as numbers."""
    known = set(class_names)
    if not all(label.isdecimal() for label in labels) or known.intersection(labels):
        return labels
    numbers = sorted({int(label) for label in labels})
    # Caffe's lists count the sorted folders of ImageNet; ILSVRC's own numbers begin at 1
    if all(map(_WORDNET_ID.fullmatch, known)) and numbers == list(range(len(known))):
        ordered = sorted(known)
        return [ordered[int(label)] for label in labels]
    text = f"{source} has numbers for classes ({shorten(', '.join(labels[:3]))}, …)"
    raise ValueError(
        f"{text}, whose order isn't known; write the names of the training folders, or take"
        " LOC_val_solution.csv or imagenet_2012_validation_synset_labels.txt"
    )
