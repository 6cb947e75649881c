"""Image folders: root/<split>/<class>/* or root/<class>/*, unless there is a table of the images."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from vit.data.sets.source import (
    SPLIT_NAMES,
    Aliases,
    FileReader,
    FindOptions,
    FoundSplit,
    FoundSplits,
    ImageSource,
    choose_classes,
    take_validation_as_test,
)
from vit.data.sets.tables import find_tables, is_table, list_tables

IMAGE_SUFFIXES = tuple(".avif .bmp .gif .jfif .jpe .jpeg .jpg .pgm .png .ppm .tif .tiff .webp".split())  # noqa: SIM905


def find_folder(options: FindOptions) -> FoundSplits:
    """The splits below a folder of the user's own images, or of a table of them."""
    path = Path(options.root or "").expanduser()
    root = path if is_table(path) else existing_root("folder", options)
    if tables := list_tables(root):
        return find_tables("folder", root if root.is_dir() else root.parent, tables, options.classes)
    return find_splits("folder", root, options.classes)


def existing_root(name: str, options: FindOptions) -> Path:
    """The root as a folder that exists."""
    if options.root is None:
        raise ValueError(f"data.name={name} needs data.root, the folder that holds the images")
    folder = Path(options.root).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"data.root {folder} is not a folder")
    return folder


def find_splits(name: str, root: Path, classes: Sequence[str] | None, *, aliases: Aliases | None = None) -> FoundSplits:
    """The splits below `root`; one folder of classes is all "train". `aliases`: folder name → readable name."""
    of_splits = split_folders(root) or {"train": root}
    folders, notes = take_validation_as_test(of_splits), []
    if folders.keys() != of_splits.keys():
        notes = [f"{folders['test'].name}/ is the test split; validation images are held out of train/"]
    first = folders.get("train") or next(iter(folders.values()))
    listed = set(known := _list_classes(first))
    kept = choose_classes(known, classes, aliases=aliases)
    if len(kept) < 2:
        found = f"one class, {kept[0]!r}" if kept else "no class folders"
        raise ValueError(f"{first} holds {found}; a classifier needs two or more: {first}/<class>/<image>")
    for folder in folders.values():
        if unknown := [entry for entry in _list_classes(folder) if entry not in listed]:
            raise ValueError(f"{folder} holds class {unknown[0]!r}, which {first} does not have")
    scan = partial(_scan, name, root, kept=kept, aliases=aliases or {}, notes=notes, first=first)
    return {split: FoundSplit(f"{folder.absolute().name}/", partial(scan, folder)) for split, folder in folders.items()}


def split_folders(root: Path) -> dict[str, Path]:
    """Split → its folder, for those that exist below `root`."""
    entries = {entry.name.lower(): entry for entry in sorted(root.iterdir()) if entry.is_dir()}
    return {split: entries[alias] for split, names in SPLIT_NAMES.items() for alias in names if alias in entries}


def _list_classes(folder: Path) -> list[str]:
    return [e.name for e in sorted(folder.iterdir()) if e.is_dir() and not e.name.startswith((".", "__"))]


def _scan(
    name: str, root: Path, folder: Path, *, kept: Sequence[str], aliases: Aliases, notes: list[str], first: Path
) -> ImageSource:
    """Every image below folder/<class>, in sorted order; other files are counted and ignored."""
    paths: list[str] = []
    counts: list[int] = []
    ignored = 0
    for class_folder in kept:
        files = list(list_files(folder / class_folder, follow_links=True, hidden=False))
        images = [path for path in files if path.lower().endswith(IMAGE_SUFFIXES) and os.path.basename(path)[0] != "."]
        if folder == first and not images:
            raise ValueError(f"{folder / class_folder} holds no images; remove it, or name others in data.classes")
        ignored += len(files) - len(images)
        place, length = os.path.relpath(folder / class_folder, root), len(str(folder / class_folder))
        paths += [place + path[length:] for path in images]
        counts.append(len(images))
    if not paths:
        raise ValueError(f"{folder} holds no images")
    if ignored:
        notes = [*notes, f"{ignored} hidden files or files that are no images were ignored in {folder.name}/"]
    names, labels = tuple(aliases.get(entry, entry) for entry in kept), np.repeat(np.arange(len(kept)), counts)
    reader = FileReader(root, paths)
    return ImageSource(name=name, class_names=names, labels=labels, ids=paths, reader=reader, notes=tuple(notes))


def list_files(folder: str | Path, *, follow_links: bool = False, hidden: bool = True) -> Iterator[str]:
    """Files below a folder, each directory's in sorted order, but for directories that can't be read. Raises ValueError
    for links that lead back to a directory that they lie in: every image would be found again below it."""
    waiting: list[tuple[str, tuple[str, ...]]] = [(os.fspath(folder), ())]  # with the places of the links on the way
    while waiting:
        directory, places = waiting.pop()
        below = list[tuple[str, tuple[str, ...]]]()
        with suppress(OSError), os.scandir(directory) as found:
            for entry in sorted(found, key=lambda entry: entry.name):
                is_linked = follow_links and entry.is_symlink()  # DirEntry.is_dir raises for a link to itself
                if not (os.path.isdir(entry.path) if is_linked else entry.is_dir(follow_symlinks=False)):
                    yield entry.path
                elif hidden or not entry.name.startswith("."):
                    below.append((entry.path, places))
        for number, (link, _) in enumerate(below):
            if os.path.islink(link):
                passed, target = (*places, os.path.realpath(directory)), os.path.realpath(link)
                if any(os.path.commonpath([place, target]) == target for place in passed):
                    raise ValueError(f"{link} leads back to {target}, in which it lies; remove the link")
                below[number] = link, passed
        waiting += reversed(below)
