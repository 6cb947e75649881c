"""Image folders: root/<split>/<class>/* or root/<class>/*, unless there is a table of the
images, or idx files."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from vit.data.class_names import (
    Aliases,
    ClassChoice,
    check_classes,
    choose_classes,
    find_wordnet_names,
)
from vit.data.dataset import ImageDataset, Request, Source, SourceSplits, root_exists
from vit.data.images import is_image_name, list_files
from vit.data.sources.base import FileReader, count_suffixes, describe_counts, find_split_folders
from vit.data.sources.idx import find_idx, list_idx
from vit.data.sources.tables import find_tables, is_table, list_tables
from vit.runtime.arguments import shorten


def find_folder(request: Request) -> SourceSplits:
    """Find the splits of a folder of the user's own images, of a table of them, or of idx files."""
    assert request.root is not None
    classes = request.classes
    path = Path(request.root).expanduser()
    if not is_table(path):
        path = check_root(path)

    tables = list_tables(path)
    if tables:
        folder = path if path.is_dir() else path.parent
        return find_tables(folder, tables, classes, allow_outside=request.allow_outside)
    idx_files = list_idx(path)
    if idx_files:
        return find_idx("folder", idx_files, classes)
    return find_class_folders("folder", path, classes)


def is_folder(place: str) -> bool:
    """Return true for a folder or a table."""
    path = Path(place).expanduser()
    return is_table(path) or path.is_dir()


SOURCE = Source(
    "folder",
    find_folder,
    recognizes=is_folder,
    needs_root=True,
    is_here=root_exists,
    unit="files",
)


def check_root(root: Path | str) -> Path:
    """Return the root as a folder. Raises FileNotFoundError if it doesn't exist."""
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"data.root {folder} is not a folder; check the path")
    return folder


def find_class_folders(
    name: str, root: Path, classes: ClassChoice, *, aliases: Aliases | None = None
) -> SourceSplits:
    """Find the splits below a folder: train/<class>/*, val/<class>/* and so on, or <class>/* alone,
    which is all "train".

    Args:
        name: The data.name.
        root: The folder.
        classes: Classes to keep, by folder name or alias; None keeps all.
        aliases: Folder name → readable name.

    Raises:
        ValueError: There are fewer than two classes, a split has a class that the training images
            lack, an image has two classes, or a folder may be a split or a class.
    """
    folders = _find_splits(root)
    # the training images say which classes there are
    first = folders.get("train") or next(iter(folders.values()))
    all_classes = list_classes(first)
    # data.classes may name them in words, too
    words = find_wordnet_names(all_classes) if classes and aliases is None else aliases
    class_folders = choose_classes(all_classes, classes, aliases=words)
    check_classes(class_folders, origin=f"{first}/<class>/<image>{_suggest_folder(first)}")
    for folder in folders.values():
        unknown = set(list_classes(folder)) - set(all_classes)
        if unknown:
            text = f"{folder} holds class {min(unknown)!r}, which {first} does not have"
            raise ValueError(f"{text}; add training images of it, or remove it")
    check_link = _make_link_check(
        [folder / class_folder for folder in folders.values() for class_folder in class_folders]
    )

    readable = aliases or {}
    class_names = tuple(readable.get(folder, folder) for folder in class_folders)

    def load(split: str) -> ImageDataset:
        folder = folders[split]
        directories = [folder / class_folder for class_folder in class_folders]
        paths, counts, unused = _list_images(
            directories, root, needs_every_class=folder == first, check_link=check_link
        )
        if not paths:
            raise ValueError(f"{folder} holds no images; check the path")
        notes: tuple[str, ...] = ()
        if unused:
            notes = (f"not images in {folder.absolute().name}/: {describe_counts(unused)}",)
        return ImageDataset(
            name=name,
            class_names=class_names,
            labels=np.repeat(np.arange(len(counts)), counts),
            ids=paths,
            reader=FileReader(root, paths),
            notes=notes,
            unused=unused,
        )

    origins = {split: f"{folder.absolute().name}/" for split, folder in folders.items()}
    unused = _count_unused(root, folders.values())
    return SourceSplits(origins, load, unused).with_test_split()


def check_not_inside(output: Path, root: Path) -> None:
    """Refuse an output directory that would be a class of the images.

    Args:
        output: The directory, before it is made.
        root: Folder of the images.

    Raises:
        ValueError: The folders below the root are classes, and the output is one of them or in one.
    """
    if not root.is_dir() or root.resolve() not in output.resolve().parents:
        return
    if not find_split_folders(root) and not list_tables(root):
        text = f"--output {output} is inside the images, {root}, and would be taken for a class"
        raise ValueError(f"{text}; choose another --output")


def _find_splits(root: Path) -> dict[str, Path]:
    """Find the folder of each split; {"train": root} if the folders below the root are classes.

    Raises:
        ValueError: The folders may be splits or classes.
    """
    # a split holds folders of classes; a class may be called "test", too
    named = find_split_folders(root)
    if not named:
        return {"train": root}
    splits = {split: folder for split, folder in named.items() if list_classes(folder)}
    others = [folder for folder in _list_folders(root) if folder not in splits.values()]
    others_with_images = [folder.name for folder in others if any(_find_images(folder))]

    if not splits:
        if len(others_with_images) == len(named):
            folder = next(iter(named.values()))
            text = f"{folder} holds images in no folder of a class"
            raise ValueError(f"{text}; move them into {folder.name}/<class>/")
        return {"train": root}

    named_folders = {folder.name for folder in named.values()}
    strangers = [name for name in others_with_images if name not in named_folders]
    if len(splits) == 1 and strangers:
        (folder,) = splits.values()
        names = shorten(", ".join(f"{name}/" for name in strangers))
        raise ValueError(
            f"{root} holds {folder.name}/ beside {names}: if {folder.name}/ is a class, rename it; "
            "if it is a split, move the others away or call them val and test"
        )
    return splits


def list_classes(folder: Path) -> list[str]:
    """List the folders in a folder that may be classes, sorted by name."""
    names = [entry.name for entry in _list_folders(folder)]
    return [name for name in names if not name.startswith("__")]


def _list_folders(folder: Path) -> list[Path]:
    entries = (entry for entry in sorted(folder.iterdir()) if entry.is_dir())
    return [entry for entry in entries if not entry.name.startswith(".")]


def _find_images(folder: Path) -> Iterator[str]:
    return filter(is_image_name, list_files(folder, hidden=False))


def _count_unused(root: Path, folders: Collection[Path]) -> Counter[str]:
    """Count the files below the root that are in no folder of a class."""
    unused: Counter[str] = Counter()
    for folder in {root, *folders}:
        files = [entry.name for entry in folder.iterdir() if entry.is_file()]
        unused += count_suffixes(files, images=f"images in {folder.absolute().name}/ itself")

        class_folders = list_classes(folder) if folder in folders else []
        for entry in _list_folders(folder):
            if entry not in folders and entry.name not in class_folders:
                images = f"images in {entry.relative_to(root)}/"
                unused.update(images for _ in _find_images(entry))
    return unused


def _suggest_folder(root: Path) -> str:
    """Suggest the folder that holds several classes, below a folder that holds only one folder."""
    folder = root
    while len(subfolders := _list_folders(folder)) == 1:
        (folder,) = subfolders
    if folder == root or not subfolders:
        return ""
    return f" (did you mean {folder}?)"


def _make_link_check(class_folders: Sequence[Path]) -> Callable[[str], None]:
    """Make a check that refuses links by which images would be found twice: under two classes, in
    two splits or again below themselves.

    Raises:
        ValueError: A folder of a class is a link to another one.
    """
    folder_at: dict[str, str] = {}
    for folder in map(os.fspath, class_folders):
        target = os.path.realpath(folder)
        if target in folder_at:
            text = f"{folder} and {folder_at[target]} are the same folder"
            raise ValueError(f"{text}, whose images would have two classes; remove the link")
        folder_at[target] = folder

    def check_link(link: str) -> None:
        target = os.path.realpath(link)
        # the link leads to a folder above it, or to one that a link above it leads to
        if any(os.path.realpath(parent) == target for parent in Path(link).absolute().parents):
            text = f"{link} leads back to {target}, in which it lies"
            raise ValueError(f"{text}; remove the link")
        # find the class folder that the link leads into, from the inside out
        place = target
        while place not in folder_at and place != os.path.dirname(place):
            place = os.path.dirname(place)
        folder = folder_at.get(place)
        if folder is not None and not f"{link}/".startswith(f"{folder}/"):
            text = f"{link} leads to {target}, an image or folder of {folder}"
            raise ValueError(f"{text}; remove the link")

    return check_link


def _list_images(
    class_folders: Sequence[Path],
    root: Path,
    *,
    needs_every_class: bool,
    check_link: Callable[[str], None],
) -> tuple[list[str], list[int], Counter[str]]:
    """List every image below the folders of the classes, in sorted order.

    Returns:
        Paths relative to the root, the number of images of each class, and the number of other
        files by suffix.
    """
    paths: list[str] = []
    counts: list[int] = []
    unused: Counter[str] = Counter()
    for directory in class_folders:
        # a split may lack a class
        files = list(list_files(directory, hidden=False, check_link=check_link))
        images = [file for file in files if is_image_name(file)]
        others = count_suffixes(set(files) - set(images))
        if needs_every_class and not images:
            held = f", only {describe_counts(others)}" if others else ""
            hint = "remove it, or name others in data.classes"
            raise ValueError(f"{directory} holds no images{held}; {hint}")

        # cutting texts is many times faster than making a relative path for each image
        relative = os.path.relpath(directory, root)
        start = len(str(directory))
        paths.extend(relative + image[start:] for image in images)
        counts.append(len(images))
        unused += others
    return paths, counts, unused
