"""Image folders: root/<split>/<class>/* or root/<class>/*, images whose class is in their path, or
a table in the folder."""

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from vit.data.dataset import ImageRule
from vit.data.images import is_image_name
from vit.data.patterns import search_group
from vit.data.sources.base import (
    SPLIT_OF,
    FileReader,
    Listing,
    describe_unused,
    find_split_folders,
    list_below,
    list_folders,
)
from vit.data.sources.tables import find_table, is_table, list_table
from vit.runtime.arguments import shorten
from vit.runtime.files import expand_home
from vit.runtime.places import explain_file, suggest


def find_folder(root: Path | str, rule: ImageRule) -> Listing:
    """List a folder of the user's own images, or a table of them."""
    if rule.label_by is not None:
        return _list_by_name(check_root(root), rule.label_by)
    if table := find_table(expand_home(root)):
        return list_table(table, rule)
    folder = check_root(root)
    if rule.finds_labels:
        raise ValueError(f"{folder} holds no labels.csv; give the path of the table")
    return list_folder(folder, rule.classes)


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


def list_folder(root: Path, classes: Sequence[str] | None) -> Listing:
    """List the images below a folder: train/<class>/*, val/<class>/* and so on, or <class>/* alone,
    which is all "train". Classes that aren't kept may be empty. Raises ValueError if there are no
    images, or a folder may be a split or a class."""
    split_of = find_split_folders(root)
    beside = [each for each in list_folders(root) if split_of and each not in split_of]
    if others := [each for each in beside if any(map(is_image_name, list_below(root / each)))]:
        raise ValueError(
            f"{root} holds {' and '.join(split_of)}, which are names of splits, beside"
            f" {shorten(', '.join(others))}; move these away, or rename those if they are classes"
        )
    notes: list[str] = []
    # path of each image → its class and its split
    found: dict[str, tuple[str, str]] = {}
    unused = _list_files(root)
    for split_name, split in (split_of or {"": "train"}).items():
        folder = root / split_name
        if split_of:
            unused += _list_files(folder)
        class_names = list_folders(folder)
        if not class_names and split_of:
            text = f"{folder} holds images in no folder of a class"
            if split != "test":
                raise ValueError(f"{text}; move them into {folder.name}/<class>/")
            notes.append(f"{text}: they are not used, and test images are taken from the others")
        for class_name in class_names:
            start = posixpath.join(split_name, class_name)
            files = list_below(folder / class_name)
            images = list(filter(is_image_name, files))
            found |= {f"{start}/{image}": (class_name, split) for image in images}
            rest = set(files) - set(images)
            unused += rest
            # the training images say which classes there are
            if not images and split == "train" and class_name in (classes or class_names):
                held = [f"{folder / class_name} holds no images", *describe_unused(rest)]
                raise ValueError(f"{'; '.join(held)}; remove it, or name others in data.classes")
    if not found:
        raise ValueError(
            f"{root} holds no images in folders of classes; move them into a folder for each class,"
            " name their table, unpack their archive, or find the class in their names with"
            " --label-by"
        )
    return _make_listing(root, found, unused, notes)


def _list_by_name(root: Path, label_by: str) -> Listing:
    """List images whose class a regular expression finds in their path below `root`. Those in its
    folders train/, val/ and test/ are these splits. Raises ValueError if it finds no class."""
    files = list_below(root)
    paths = sorted(filter(is_image_name, files))
    labels = search_group(label_by, paths, name="data.label_by")
    class_of = {path: label for path, label in zip(paths, labels, strict=True) if label}
    if not class_of:
        text = f"data.label_by {label_by!r} finds no class in the paths below {root}"
        raise ValueError(f"{text}, {shorten(str(paths[:1]))}")
    notes = []
    if others := [path for path in paths if path not in class_of]:
        text = f"{len(others):,} images have no class by data.label_by and are not used"
        notes.append(f"{text}, such as {others[0]}")
    splits = [SPLIT_OF.get(path.partition("/")[0].lower(), "") for path in class_of]
    # folders of other names would have no split
    if "" in splits or "train" not in splits:
        splits = ["train"] * len(splits)
    found = dict(zip(class_of, zip(class_of.values(), splits, strict=True), strict=True))
    return _make_listing(root, found, set(files) - set(paths), notes)


def _make_listing(
    root: Path,
    found: Mapping[str, tuple[str, str]],
    unused: Iterable[str],
    notes: Sequence[str],
) -> Listing:
    return Listing(
        labels=[class_name for class_name, _ in found.values()],
        reader=FileReader(root, list(found)),
        splits=[split for _, split in found.values()],
        read=describe_unused(unused),
        notes=notes,
    )


def check_not_inside(output: Path, root: Path) -> None:
    """Raise ValueError for an output directory, not made yet, that would be a class of the images
    in the folder `root`."""
    is_inside = root.is_dir() and root.resolve() in output.resolve().parents
    if is_inside and not find_split_folders(root) and find_table(root) is None:
        raise ValueError(
            f"--output {output} is inside the images, {root}, and would be taken for a class"
            "; choose another --output"
        )


def _list_files(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if entry.is_file()]
