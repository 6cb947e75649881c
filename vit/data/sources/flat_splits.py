"""Splits whose images lie in one folder, with their classes in a text file: val/ of ImageNet and
Tiny ImageNet as they are downloaded."""

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit.data.class_names import number_labels
from vit.data.images import is_image_name, list_files
from vit.data.sources.base import relative_path
from vit.data.sources.table_text import LABEL_NAMES, PATH_NAMES, read_table_file
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
        labels: Path relative to the root → class.
        source: The file with the classes.
        num_others: Number of the other images, which are of classes without training images.
    """

    labels: dict[str, str]
    source: Path
    num_others: int

    def list_images(self, class_names: Sequence[str]) -> tuple[list[str], np.ndarray]:
        """List the images of some classes: their paths, and their labels [n], places in
        `class_names`."""
        known = set(class_names)
        chosen = {path: label for path, label in self.labels.items() if label in known}
        return list(chosen), number_labels(chosen.values(), class_names)


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
    files = filter(is_image_name, list_files(folder, left_out=[]))
    paths = [relative_path(file, root) for file in files]
    rows = _read_rows(source)
    if all(len(row) == 1 for row in rows):
        # a class a line, in the order of the names
        if len(rows) != len(paths):
            raise ValueError(
                f"{source} has {len(rows):,} lines, and {folder} {len(paths):,} images"
                "; take the file that belongs to them"
            )
        by_name = {_stem(path): row[0] for path, row in zip(sorted(paths), rows, strict=True)}
    else:
        by_name = {_stem(row[0]): row[1] for row in rows if len(row) > 1}

    missing = [path for path in paths if _stem(path) not in by_name]
    if missing:
        raise ValueError(
            f"{source} has no class for {len(missing):,} images, such as {missing[0]}"
            "; add them, or move them away"
        )
    known = set(class_names)
    named = _name_classes([by_name[_stem(path)] for path in paths], known, source)
    labels = {path: label for path, label in zip(paths, named, strict=True) if label in known}
    if not labels:
        raise ValueError(
            f"{source} names classes such as {named[0]!r}, and no folder of training images"
            " has these names; take the file that belongs to them"
        )
    return FlatSplit(labels, source, len(paths) - len(labels))


def _find_source(folder: Path) -> Path | None:
    near = (folder, folder.parent)
    above = (folder, *folder.absolute().parents[:4])
    paths = [
        place / name.format(folder.name)
        for names, places in ((_NEAR, near), (_ABOVE, above))
        for name in names
        for place in places
    ]
    return next(filter(Path.is_file, paths), None)


def _read_rows(source: Path) -> list[list[str]]:
    if source.suffix == ".csv":
        table = read_table_file(source)
        places = [
            next((table.names.index(name) for name in known if name in table.names), None)
            for known in (PATH_NAMES, LABEL_NAMES)
        ]
        if None not in places:
            return [
                [str(fields[place]) for place in places if place is not None]
                for _, fields in table.rows
            ]
    lines = (line.strip() for line in read_text(source).removeprefix("\ufeff").splitlines())
    return [re.split(r'[\s,;"]+', line.strip('"')) for line in lines if line]


def _stem(path: str) -> str:
    name = os.path.basename(path)
    return os.path.splitext(name)[0] if is_image_name(name) else name


def _name_classes(labels: Sequence[str], known: set[str], source: Path) -> Sequence[str]:
    """Return the names of classes that are written as numbers."""
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
