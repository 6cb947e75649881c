"""Image folders: root/<split>/<class>/* or root/<class>/*, images whose class is in their path, or
a table in the folder."""

import os
from collections import Counter
from pathlib import Path

from vit.data.class_names import ClassChoice, sort_class_names
from vit.data.dataset import LabelRule, Request
from vit.data.images import is_image_name, is_system_folder, list_files
from vit.data.sources.base import (
    SPLIT_OF,
    FileReader,
    count_suffixes,
    count_system_images,
    describe_counts,
    find_split_folders,
    list_below,
    relative_path,
)
from vit.data.sources.listing import Listing
from vit.data.sources.tables import find_tables, is_table, list_tables
from vit.runtime.arguments import shorten
from vit.runtime.files import expand_home
from vit.runtime.patterns import check_pattern, search_group
from vit.runtime.places import explain_file, is_archive, suggest


def find_folder(request: Request) -> Listing:
    """List a folder of the user's own images, or a table of them."""
    path = request.place
    if is_table(path):
        return find_tables(path.parent, [path], request)
    path = check_root(path)
    if request.labels.label_by is not None:
        return find_by_name(path, request.labels.label_by)
    tables = list_tables(path)
    if tables:
        return find_tables(path, tables, request)
    if request.labels._replace(task=None) != LabelRule():
        raise ValueError(f"{path} holds no labels.csv; give the path of the table")
    return find_class_folders("folder", path, request.classes)


def is_folder(place: str) -> bool:
    """Return true for a folder or a table."""
    path = expand_home(place)
    return is_table(path) or path.is_dir()


def check_root(root: Path | str) -> Path:
    """Return the root as a folder. Raises FileNotFoundError if it doesn't exist."""
    folder = expand_home(root)
    if problem := explain_file(folder):
        raise ValueError(f"data.root {problem}")
    if not folder.is_dir():
        hint = suggest(folder) or "; check the path"
        raise FileNotFoundError(f"data.root {folder} is not a folder{hint}")
    return folder


def find_class_folders(name: str, root: Path, classes: ClassChoice) -> Listing:
    """List the images below a folder: train/<class>/*, val/<class>/* and so on, or <class>/* alone,
    which is all "train".

    Args:
        name: The data.name.
        root: The folder.
        classes: Classes that will be kept; None keeps all. The others may be empty.

    Raises:
        ValueError: There are no images, or a folder may be a split or a class.
    """
    folders, notes, unused = _find_splits(root)
    # the training images say which classes there are
    first = "train" if "train" in folders else next(iter(folders), "")
    paths: list[str] = []
    labels: list[str] = []
    splits: list[str] = []
    for split, folder in folders.items():
        for class_folder in list_classes(folder):
            left_out: list[str] = []
            files = list_below(folder / class_folder, left_out)
            unused += count_system_images(left_out)
            images = [file for file in files if is_image_name(file)]
            unused += count_suffixes(set(files) - set(images))
            is_kept = classes is None or class_folder in classes
            if not images and split == first and is_kept:
                held = describe_counts(count_suffixes(files))
                hint = "remove it, or name others in data.classes"
                if any(map(is_archive, files)):
                    hint = "unpack its archive there"
                text = f"{folder / class_folder} holds no images{held and ', only '}{held}"
                raise ValueError(f"{text}; {hint}")
            inside = relative_path(folder / class_folder, root)
            paths += [f"{inside}/{image}" for image in images]
            labels += [class_folder] * len(images)
            splits += [split] * len(images)
    if not paths:
        raise ValueError(f"{root} holds no images in folders of classes{_explain(root)}")
    # a single class that holds folders alone may hold the classes
    parents = {os.path.dirname(path) for path in paths}
    inner = os.path.commonpath(parents)
    hint = "" if inner in {"", *parents} else f" (did you mean {root / inner}?)"
    return Listing(
        name=name,
        origin=f"{root}/<class>/<image>{hint}",
        ids=paths,
        labels=labels,
        reader=FileReader(root, paths),
        splits=splits,
        origins={split: f"{folder.absolute().name}/" for split, folder in folders.items()},
        # their order is that of the folders
        class_names=sort_class_names(labels),
        notes=notes,
        unused=unused,
    )


def _explain(root: Path) -> str:
    """Say what a folder without folders of classes holds, and what to do."""
    entries = sorted(root.iterdir())
    archives = [entry.name for entry in entries if is_archive(entry.name)]
    if archives:
        return f", but the archive {archives[0]}; unpack it there"
    tables = [entry.name for entry in entries if is_table(entry)]
    if tables:
        return f"; if {tables[0]} names the classes, use vit train {root / tables[0]}"
    if any(is_image_name(entry.name) for entry in entries):
        hint = "or find the class in their names with --label-by"
        return f"; move them into a folder for each class, {hint}"
    return "; check the path"


def _find_splits(root: Path) -> tuple[dict[str, Path], list[str], Counter[str]]:
    """Find the folder of each split; {"train": root} if the folders below the root are classes.

    Returns:
        The folders; sentences about what isn't read; and the number of files that aren't used.

    Raises:
        ValueError: Some folders are named like splits and others aren't, or the images of a split
            are in no folder of a class.
    """
    unused = _count_files(root)
    systems = [entry for entry in root.iterdir() if entry.is_dir() and is_system_folder(entry.name)]
    unused += count_system_images(systems)
    notes: list[str] = []
    named = find_split_folders(root)
    if not named:
        return {"train": root}, notes, unused
    others = [name for name in list_classes(root) if root / name not in named.values()]
    strangers = [
        f"{name}/"
        for name in others
        if any(map(is_image_name, list_files(root / name, left_out=[])))
    ]
    if strangers:
        splits = " and ".join(f"{folder.name}/" for folder in named.values())
        raise ValueError(
            f"{root} holds {splits}, which are names of splits, beside"
            f" {shorten(', '.join(strangers))}; move these away, or rename {splits} if they are"
            " classes"
        )
    folders: dict[str, Path] = {}
    for split, folder in named.items():
        unused += _count_files(folder)
        if list_classes(folder):
            folders[split] = folder
            continue
        text = f"{folder} holds images in no folder of a class"
        if split != "test":
            raise ValueError(f"{text}; move them into {folder.name}/<class>/")
        notes.append(f"{text}: they are not used, and test images are taken from the others")
    return folders, notes, unused


def _count_files(folder: Path) -> Counter[str]:
    names = (entry.name for entry in folder.iterdir() if entry.is_file())
    return count_suffixes(names, images=f"images in {folder.absolute().name}/ itself")


def find_by_name(root: Path, label_by: str) -> Listing:
    """List images whose class is in their path.

    Args:
        root: Folder of the images. Those in its folders train/, val/ and test/ are these splits.
        label_by: Regular expression with one group, which is searched in the path below `root`.

    Raises:
        ValueError: The expression is wrong, or finds no class.
    """
    # before images are listed
    check_pattern(label_by, name="data.label_by")
    origin = f"data.label_by {label_by!r}"
    left_out: list[str] = []
    files = list_below(root, left_out)
    paths = sorted(filter(is_image_name, files))
    labels = search_group(label_by, paths, name="data.label_by")
    found = {path: label for path, label in zip(paths, labels, strict=True) if label}
    if not found:
        example = f"paths such as {shorten(paths[0])!r}" if paths else f"{root}, without images"
        raise ValueError(f"{origin} finds no class in {example}; try another one")
    if {label.lower() for label in found.values()} <= SPLIT_OF.keys():
        names = " and ".join(sorted(set(found.values())))
        raise ValueError(f"{origin} finds {names}, which are splits; correct it")
    unused = count_suffixes(file for file in files if not is_image_name(file))
    unused += count_system_images(left_out)
    notes = []
    others = [path for path in paths if path not in found]
    if others:
        unused["images without a class in their path"] = len(others)
        text = f"{len(others):,} images have no class by data.label_by, such as {others[0]}"
        notes.append(f"{text}; they are not used")
    tops = [path.partition("/")[0] for path in found]
    splits = [SPLIT_OF.get(top.lower(), "") for top in tops]
    # folders of other names would have no split
    if not all(splits) or "train" not in splits:
        splits = ["train"] * len(tops)
        tops = [root.absolute().name] * len(tops)
    return Listing(
        name="folder",
        origin=origin,
        ids=list(found),
        labels=list(found.values()),
        reader=FileReader(root, list(found)),
        splits=splits,
        origins={split: f"{top}/" for split, top in zip(splits, tops, strict=True)},
        notes=notes,
        unused=unused,
    )


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
        raise ValueError(
            f"--output {output} is inside the images, {root}, and would be taken for a class"
            "; choose another --output"
        )


def list_classes(folder: Path) -> list[str]:
    """List the folders in a folder that may be classes, sorted by name."""
    names = [entry.name for entry in sorted(folder.iterdir()) if entry.is_dir()]
    return [name for name in names if not is_system_folder(name) and not name.startswith("__")]
