"""Image folders: root/<split>/<class>/*, root/<class>/*, or a root with a labels.csv."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from vit.data.images import read_image
from vit.data.sets.source import Aliases, FindOptions, FoundSplit, FoundSplits, ImageSource, choose_classes
from vit.runtime.arguments import shorten
from vit.runtime.documents import read_table

IMAGE_SUFFIXES = tuple(".avif .bmp .gif .jfif .jpe .jpeg .jpg .pgm .png .ppm .tif .tiff .webp".split())  # noqa: SIM905
_SPLITS = {"train": ("train", "training"), "validation": ("val", "valid", "validation"), "test": ("test", "testing")}


@dataclass(frozen=True, eq=False)
class FileReader:
    """Image files below a root."""

    root: Path
    paths: Sequence[str]  # relative to the root

    def read(self, index: int) -> Image.Image:
        return read_image(self.root / self.paths[index])

    def cache_key(self) -> bytes:
        stats = [os.stat(self.root / path) for path in self.paths]
        return np.array([(stat.st_size, stat.st_mtime_ns) for stat in stats], dtype=np.int64).tobytes()

    def subset(self, indices: np.ndarray) -> FileReader:
        return FileReader(self.root, [self.paths[index] for index in indices])


def find_folder(options: FindOptions) -> FoundSplits:
    """The splits below a folder of the user's own images."""
    return find_splits("folder", existing_root("folder", options), options.classes)


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
    if (root / "labels.csv").is_file():
        return _read_label_file(name, root, classes)
    folders = split_folders(root) or {"train": root}
    notes = []
    if "validation" in folders and "test" not in folders:
        folders["test"] = folders.pop("validation")
        notes = [f"{folders['test'].name}/ is the test split; validation images are held out of train/"]
    first = folders.get("train") or next(iter(folders.values()))
    known = _list_classes(first)
    kept = choose_classes(known, classes, aliases=aliases)
    if len(kept) < 2:
        found = f"one class, {kept[0]!r}" if kept else "no class folders"
        raise ValueError(f"{first} holds {found}; a classifier needs two or more: {first}/<class>/<image>")
    for folder in folders.values():
        if unknown := [entry for entry in _list_classes(folder) if entry not in known]:
            raise ValueError(f"{folder} holds class {unknown[0]!r}, which {first} does not have")
    scan = partial(_scan, name, root, kept=kept, aliases=aliases or {}, notes=notes, first=first)
    return {split: FoundSplit(f"{folder.absolute().name}/", partial(scan, folder)) for split, folder in folders.items()}


def split_folders(root: Path) -> dict[str, Path]:
    """Split → its folder, for those that exist below `root`."""
    entries = {entry.name.lower(): entry for entry in sorted(root.iterdir()) if entry.is_dir()}
    return {split: entries[alias] for split, names in _SPLITS.items() for alias in names if alias in entries}


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
        paths += [os.path.relpath(path, root) for path in images]
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
    for a link to a directory that it lies in: every image would be found again below it."""
    waiting = [os.fspath(folder)]
    while waiting:
        directory, below = waiting.pop(), []
        with suppress(OSError), os.scandir(directory) as found:
            for entry in sorted(found, key=lambda entry: entry.name):
                if not entry.is_dir(follow_symlinks=follow_links):
                    yield entry.path
                elif hidden or not entry.name.startswith("."):
                    below.append(entry.path)
        for link in filter(os.path.islink, below):
            here, target = os.path.realpath(directory), os.path.realpath(link)
            if os.path.commonpath([here, target]) == target:
                raise ValueError(f"{link} leads back to {target}, in which it lies; remove the link")
        waiting += reversed(below)


def _read_label_file(name: str, root: Path, classes: Sequence[str] | None) -> FoundSplits:
    """root/labels.csv with the header path,label or path,label,split; a wrong line is named by its number."""
    file = root / "labels.csv"
    rows: dict[str, list[tuple[str, str]]] = {}
    seen: set[str] = set()
    table = read_table(file)
    _, header = next(table, ("", []))
    if header not in (["path", "label"], ["path", "label", "split"]):
        raise ValueError(f"{file} line 1 must be path,label or path,label,split, not {shorten(','.join(header))!r}")
    for where, row in table:
        if len(row) != len(header) or not all(row):
            given = f"{','.join(header)}: {shorten(','.join(row))!r}"
            raise ValueError(f"{where} must have {len(header)} values, {given}")
        split = row[2] if len(row) == 3 else "train"
        if split not in _SPLITS:
            raise ValueError(f"{where}: unknown split {shorten(split)!r}; known: {', '.join(_SPLITS)}")
        if not os.path.isfile(root / row[0]):
            raise ValueError(f"{where}: {shorten(row[0])} is not a file below {root}")
        if row[0] in seen:
            raise ValueError(f"{where}: {row[0]} was already listed")
        seen.add(row[0])
        rows.setdefault(split, []).append((row[0], row[1]))
    class_names = tuple(sorted({label for listed in rows.values() for _, label in listed}))
    if len(class_names) < 2:
        raise ValueError(f"{file} names {len(class_names)} classes; a classifier needs at least two")

    def load(split: str) -> ImageSource:
        paths, names = zip(*rows[split], strict=True)
        labels, reader = np.searchsorted(class_names, names), FileReader(root, paths)
        source = ImageSource(name=name, class_names=class_names, labels=labels, ids=paths, reader=reader)
        return source.keep_classes(classes)

    return {split: FoundSplit(f"{split} in labels.csv", partial(load, split)) for split in rows}
