"""Image folders: root/<split>/<class>/* or root/<class>/*, unless there is a table of the
images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vit.data.dataset import ImageDataset, SourceSplits
from vit.data.images import IMAGE_SUFFIXES, list_files
from vit.data.sources.base import (
    Aliases,
    Classes,
    FileReader,
    check_class_count,
    choose_classes,
    find_split_folders,
)
from vit.data.sources.tables import find_tables, is_table, list_tables


def find_folder(*, root: Path | str, classes: Classes, cache_dir: Path) -> SourceSplits:
    """The splits below a folder of the user's own images, or of a table of them."""
    path = Path(root).expanduser()
    if not is_table(path):
        path = check_root(root)

    tables = list_tables(path)
    if tables:
        folder = path if path.is_dir() else path.parent
        return find_tables(folder, tables, classes)
    return find_class_folders("folder", path, classes)


def check_root(root: Path | str) -> Path:
    """The root as a folder. Raises FileNotFoundError where it doesn't exist."""
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"data.root {folder} is not a folder")
    return folder


def find_class_folders(
    name: str, root: Path, classes: Classes, *, aliases: Aliases | None = None
) -> SourceSplits:
    """The splits below a folder: train/<class>/*, val/<class>/* and so on, or <class>/* alone,
    which is all "train".

    Args:
        name: the data.name.
        root: the folder.
        classes: those to keep, by folder name or alias; None keeps all.
        aliases: folder name → readable name.

    Raises:
        ValueError: there are fewer than two classes, or a split has a class that the training
            images lack.
    """
    # without folders of splits, the classes lie in the root
    folders = find_split_folders(root) or {"train": root}
    # the training images say which classes there are
    first = folders.get("train") or next(iter(folders.values()))
    all_classes = list_classes(first)
    class_folders = choose_classes(all_classes, classes, aliases=aliases)
    check_class_count(class_folders, origin=f"{first}/<class>/<image>")
    for folder in folders.values():
        unknown = set(list_classes(folder)) - set(all_classes)
        if unknown:
            raise ValueError(f"{folder} holds class {min(unknown)!r}, which {first} does not have")

    def load(split: str) -> ImageDataset:
        return _list_images(
            name,
            root,
            folders[split],
            class_folders,
            aliases=aliases or {},
            needs_every_class=folders[split] == first,
        )

    origins = {split: f"{folder.absolute().name}/" for split, folder in folders.items()}
    return SourceSplits(origins, load).with_test_split()


def list_classes(folder: Path) -> list[str]:
    entries = (entry for entry in sorted(folder.iterdir()) if entry.is_dir())
    return [entry.name for entry in entries if not entry.name.startswith((".", "__"))]


def _list_images(
    name: str,
    root: Path,
    folder: Path,
    class_folders: Sequence[str],
    *,
    aliases: Aliases,
    needs_every_class: bool,
) -> ImageDataset:
    """Every image below folder/<class>, in sorted order; other files are counted and ignored."""
    paths: list[str] = []
    counts: list[int] = []
    num_ignored = 0
    for class_folder in class_folders:
        directory = folder / class_folder
        files = list(list_files(directory, follow_links=True, hidden=False))
        # Path.suffix would take many times longer
        images = [
            file
            for file in files
            if file.lower().endswith(IMAGE_SUFFIXES) and not os.path.basename(file).startswith(".")
        ]
        if needs_every_class and not images:
            hint = "remove it, or name others in data.classes"
            raise ValueError(f"{directory} holds no images; {hint}")

        # by text, which is many times faster than a relative path for each image
        relative = os.path.relpath(directory, root)
        start = len(str(directory))
        paths.extend(relative + image[start:] for image in images)
        counts.append(len(images))
        num_ignored += len(files) - len(images)

    if not paths:
        raise ValueError(f"{folder} holds no images")
    notes = []
    if num_ignored:
        ignored = f"{num_ignored} hidden files or files that are not images"
        notes.append(f"{ignored} were ignored in {folder.name}/")
    return ImageDataset(
        name=name,
        class_names=tuple(aliases.get(name, name) for name in class_folders),
        labels=np.repeat(np.arange(len(counts)), counts),
        ids=paths,
        reader=FileReader(root, paths),
        notes=tuple(notes),
    )
