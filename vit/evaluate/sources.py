"""What is evaluated: names on the command line to images, and their classes to the model's."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from vit.data.sources import SOURCES, FileBacking, ImageSource, Split, load_source
from vit.evaluate.metrics import Ints

_SPLIT_FOLDERS = {"train", "training", "val", "valid", "validation", "test", "testing"}


def find_source(data: str | None, *, split: str | None, trained_on: dict[str, Any]) -> ImageSource:
    """The images to evaluate on.

    `data` is a data set's name, a folder, a label file (.csv) or WebDataset shards; None is what the model
    was trained on, described by `trained_on`, the data section of its configuration. The split is "test" by
    default, and "all" for a folder without split folders: as far as we know, the model has seen none of it.
    """
    own_root = trained_on.get("root")
    same = (
        data is None
        or data == trained_on.get("name")
        or (own_root is not None and _same_path(data, own_root))
    )
    if data is None and not trained_on:
        raise ValueError("this model doesn't say what it was trained on; name the images with --data")
    if same:
        return load_source(
            trained_on["name"],
            root=own_root,
            split=cast(Split, split or "test"),
            classes=trained_on.get("classes"),
            validation_fraction=trained_on.get("validation_fraction", 0.1),
            split_seed=trained_on.get("split_seed", 0),
        )
    assert data is not None
    if data in SOURCES and data != "folder":
        return load_source(data, split=cast(Split, split or "test"))
    if data.startswith("pipe:") or ".tar" in data:
        return load_source("webdataset", root=data, split=cast(Split, split or "all"))
    path = Path(data).expanduser()
    if path.is_file() and path.suffix == ".csv":
        return load_label_file(path)
    if not path.is_dir():
        names = ", ".join(name for name in SOURCES if name != "folder")
        raise ValueError(f"--data {data} is neither a data set ({names}) nor a folder, label file or shards")
    return load_source("folder", root=path, split=cast(Split, split or _default_split(path)))


def load_label_file(path: Path) -> ImageSource:
    """Images named by the lines `path,label` of a CSV file, relative to it. A first line of that is a header.

    Raises ValueError naming the line that is wrong.
    """
    paths: list[str] = []
    names: list[str] = []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        for row in reader:
            if not row or (reader.line_num == 1 and row == ["path", "label"]):
                continue
            if len(row) != 2 or not all(field.strip() for field in row):
                raise ValueError(f"{path} line {reader.line_num} is not path,label: {','.join(row)!r}")
            if not (path.parent / row[0]).is_file():
                raise ValueError(f"{path} line {reader.line_num}: there is no file {path.parent / row[0]}")
            paths.append(row[0])
            names.append(row[1])
    if not paths:
        raise ValueError(f"{path} names no image; its lines are path,label")
    class_names = tuple(sorted(set(names)))
    return ImageSource(
        name=path.stem,
        split="all",
        class_names=class_names,
        labels=np.array([class_names.index(name) for name in names], dtype=np.int64),
        ids=paths,
        backing=FileBacking(path.parent, paths),
        positions=np.arange(len(paths)),
    )


def map_labels(labels: Ints, *, source_classes: Sequence[str], model_classes: Sequence[str]) -> Ints:
    """Labels of the source as indices of the model's classes, by name.

    Raises ValueError naming the classes that occur among the labels and that the model doesn't know.
    """
    index = {name: position for position, name in enumerate(model_classes)}
    if len(index) < len(model_classes):
        raise ValueError("the model has two classes of the same name: its classes can't be matched by name")
    unknown = [source_classes[label] for label in np.unique(labels) if source_classes[label] not in index]
    if unknown:
        raise ValueError(
            f"the model doesn't know {_shorten(unknown)} of this data; it knows {_shorten(model_classes)}"
        )
    table = np.array([index.get(name, -1) for name in source_classes], dtype=np.int64)
    return table[labels]


def _default_split(folder: Path) -> str:
    has_splits = any(entry.is_dir() and entry.name.lower() in _SPLIT_FOLDERS for entry in folder.iterdir())
    return "test" if has_splits else "all"


def _same_path(left: str, right: str) -> bool:
    return Path(left).expanduser().resolve() == Path(right).expanduser().resolve()


def _shorten(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
