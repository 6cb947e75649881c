"""Image folders: root/<split>/<class>/* or root/<class>/*, unless there is a table of the
images, or idx files."""

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from vit.data.class_names import (
    Aliases,
    ClassChoice,
    check_classes,
    choose_classes,
    find_alike,
    find_wordnet_names,
    sort_class_names,
)
from vit.data.dataset import (
    ImageDataset,
    LabelRule,
    Request,
    Source,
    SourceSplits,
    root_exists,
)
from vit.data.images import is_image_name, is_system_folder, list_files
from vit.data.sources.base import (
    SPLIT_OF,
    FileReader,
    count_suffixes,
    count_system_images,
    describe_counts,
    find_split_folders,
    looks_like_split,
)
from vit.data.sources.file_names import find_by_name, suggest_names
from vit.data.sources.flat_splits import FlatSplit, read_flat_split
from vit.data.sources.idx import find_idx, list_idx
from vit.data.sources.table_paths import find_table_split
from vit.data.sources.tables import (
    find_tables,
    guess_tables,
    is_table,
    list_other_tables,
    list_tables,
)
from vit.runtime.arguments import shorten
from vit.runtime.files import expand_home
from vit.runtime.places import explain_file, is_archive, suggest

# folders in which other programs keep images, masks and boxes
_CONTENTS = frozenset(
    (
        "image", "images", "img", "imgs", "jpegimages", "mask", "masks", "label", "labels",
        "annotation", "annotations", "gt", "ground_truth", "groundtruth", "segmentation",
        "segmentations", "bbox", "bboxes", "jpg", "jpeg", "png", "meta",
    )
)  # fmt: skip
_FOLD = re.compile(r"(fold|kfold|cv|split)s?[ _-]*[0-9]+")


def find_folder(request: Request) -> SourceSplits:
    """Find the splits of a folder of the user's own images, of a table of them, or of idx files."""
    path = request.place
    if is_table(path):
        return find_tables(path.parent, [path], request)
    path = check_root(path)
    if request.labels.label_by is not None:
        return find_by_name(path, request.labels.label_by, request)

    tables = list_tables(path)
    if tables:
        return find_tables(path, tables, request)
    # torchvision keeps them in NAME/raw/
    for folder in (path, path / "raw"):
        if folder.is_dir() and (idx_files := list_idx(folder)):
            return find_idx("folder", idx_files, request.classes)

    # a table counts where the folders don't say which classes there are
    others = list_other_tables(path)
    is_named = request.labels._replace(task=None) != LabelRule()
    several = request.labels.task == "multilabel"
    if others and (is_named or several or not has_classes(path)):
        tables, reasons = guess_tables(path, request.labels)
        if tables:
            names = " and ".join(table.name for table in tables)
            guess = f"{names} of {path.absolute().name}/ names the classes"
            return find_tables(path, tables, request, guesses=[guess])
        if reasons and not (several and has_classes(path)):
            raise ValueError(f"{path} has no folders of classes. {' '.join(reasons)}")
    if is_named:
        raise ValueError(f"{path} holds no table that names images; give the path of the table")
    return find_class_folders("folder", path, request.classes, tables=others)


def is_folder(place: str) -> bool:
    """Return true for a folder or a table."""
    path = expand_home(place)
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
    folder = expand_home(root)
    if problem := explain_file(folder):
        raise ValueError(f"data.root {problem}")
    if not folder.is_dir():
        hint = suggest(folder) or "; check the path"
        raise FileNotFoundError(f"data.root {folder} is not a folder{hint}")
    # ImageNet as Kaggle packs it
    inner = folder / "ILSVRC" / "Data" / "CLS-LOC"
    return inner if inner.is_dir() else folder


def find_class_folders(
    name: str,
    root: Path,
    classes: ClassChoice,
    *,
    aliases: Aliases | None = None,
    tables: Sequence[Path] = (),
) -> SourceSplits:
    """Find the splits below a folder: train/<class>/*, val/<class>/* and so on, or <class>/* alone,
    which is all "train". The images of val/ and test/ may lie in one folder, if a text file has
    their classes.

    Args:
        name: The data.name.
        root: The folder.
        classes: Classes to keep, by folder name or alias; None keeps all.
        aliases: Folder name → readable name.
        tables: Tables in the folder. A warning names those that aren't read.

    Raises:
        ValueError: There are fewer than two classes, a split has a class that the training images
            lack, an image has two classes, or a folder may be a split or a class.
    """
    folders = _find_splits(root, classes)
    # the training images say which classes there are
    first = folders.get("train") or next(iter(folders.values()))
    all_classes = sort_class_names(list_classes(first))
    check_not_packed(first)
    flat, flat_notes = _read_flat_splits(root, folders, all_classes)
    folders = {split: folder for split, folder in folders.items() if split not in flat}
    # data.classes may name them in words, too
    words = find_wordnet_names(all_classes) if classes and aliases is None else aliases
    class_folders = choose_classes(all_classes, classes, aliases=words)
    if classes is None:
        _check_layout(first, class_folders)
    check_classes(class_folders, origin=f"{first}/<class>/<image>{_suggest_folder(first)}")
    for folder in folders.values():
        unknown = set(list_classes(folder)) - set(all_classes)
        if unknown:
            text = f"{folder} holds class {min(unknown)!r}, which {first} does not have"
            remedy = "add training images of it, or remove it"
            alike = {name.casefold(): name for name in all_classes}.get(min(unknown).casefold())
            if alike is not None:
                remedy = f"call it {alike}, too"
            raise ValueError(f"{text}; {remedy}")
    check_link = _make_link_check(
        [folder / class_folder for folder in folders.values() for class_folder in class_folders]
    )
    class_names = tuple((aliases or {}).get(folder, folder) for folder in class_folders)
    notes = _note_unread(root, first, class_folders, tables=tables, flat=flat.values())
    for names in find_alike(class_folders):
        text = " and ".join(map(repr, names))
        notes.append(f"folders whose names differ in case or zeros alone are classes: {text}")

    def load(split: str) -> ImageDataset:
        split_notes = [*notes, *flat_notes]
        unused: Counter[str] = Counter()
        if flat_split := flat.get(split):
            paths, labels = flat_split.list_images(class_folders)
        else:
            directories = [folders[split] / class_folder for class_folder in class_folders]
            paths, counts, unused = _list_images(
                directories, root, needs_every_class=folders[split] == first, check_link=check_link
            )
            labels = np.repeat(np.arange(len(counts)), counts)
        if not paths:
            raise ValueError(f"{folders.get(split, split)} holds no images; check the path")
        others = {suffix: count for suffix, count in unused.items() if " " not in suffix}
        if others:
            place = folders[split].absolute().name
            split_notes.append(f"not images in {place}/: {describe_counts(others)}")
        return ImageDataset(
            name=name,
            class_names=class_names,
            labels=labels,
            ids=paths,
            reader=FileReader(root, paths),
            notes=tuple(split_notes),
            unused=unused,
        )

    origins = {split: f"{folder.absolute().name}/" for split, folder in folders.items()}
    guesses = []
    unused: Counter[str] = Counter()
    for split, flat_split in flat.items():
        if flat_split:
            place = next(iter(flat_split.labels)).partition("/")[0]
            origins[split] = f"{place}/"
            guesses.append(f"classes of {place}/ in {flat_split.source.name}")
            unused[f"images in {place}/ of other classes"] = flat_split.num_others
    flat_folders = [root / origins[split] for split in origins if split not in folders]
    unused += _count_unused(root, [*folders.values(), *flat_folders], flat=flat_folders)
    return SourceSplits(origins, load, +unused, guesses).with_test_split()


def _check_layout(folder: Path, class_folders: Sequence[str]) -> None:
    """Refuse folders that aren't the classes.

    Args:
        folder: Folder of the training images.
        class_folders: The folders in it.

    Raises:
        ValueError: They are those of other programs (images/ and masks/), or folds, or the images
            lie in no folder.
    """
    names = [name.casefold() for name in class_folders]
    text = f"{folder} holds {shorten(', '.join(class_folders))}"
    splits = set(map(_read_split, names))
    if len(splits) > 1 and "" not in splits:
        raise ValueError(f"{text}: call the splits train, val and test")
    # a/abbey, a/airport
    is_index = all(
        len(name) == 1
        and (inner := list_classes(folder / class_folder))
        and all(each.casefold().startswith(name) for each in inner)
        for name, class_folder in zip(names, class_folders, strict=True)
    )
    if len(names) > 1 and (is_index or all(map(_FOLD.fullmatch, names))):
        hint = "if the folders in them are, --label-by '([^/]+)/[^/]+$' says so"
        raise ValueError(f"{text}, which are no classes; {hint}")
    is_contents = _CONTENTS.issuperset(names)
    if len(names) > 1 and not is_contents:
        return
    places = [folder / name for name in class_folders if is_contents]
    for place in places:
        if len(list_classes(place)) > 1:
            raise ValueError(f"{text}, which are no classes; did you mean {place}?")
    # images may lie in the folder itself, or in images/
    for place in (folder, *places):
        if not any(map(is_image_name, _list_files(place))):
            continue
        hint = suggest_names(place)
        if not hint and is_contents:
            hint = "; move them into folders of classes, or list classes in a table (path,label)"
        if hint:
            raise ValueError(f"{place} holds images in no folder of a class{hint}")
    if not names:
        held = describe_counts(count_suffixes(_list_files(folder)))
        raise ValueError(f"{folder} holds no images{held and ', only '}{held}; check the path")


def _read_split(name: str) -> str:
    """Return the split at the end of a name, such as cars_train; empty if there is none."""
    return SPLIT_OF.get(re.split(r"[ _.-]", name)[-1], "")


def _note_unread(
    root: Path,
    first: Path,
    class_folders: Sequence[str],
    *,
    tables: Sequence[Path],
    flat: Collection[FlatSplit | None],
) -> list[str]:
    """Write sentences about tables, and folders of splits below those of classes, that aren't used.

    Args:
        root: The root.
        first: Folder of the training images.
        class_folders: The folders of the classes in it.
        tables: Tables in the root.
        flat: Splits whose images have their classes in a file.
    """
    notes = []
    used = {split.source.name for split in flat if split}
    unread = [table for table in tables if table.name not in used]
    if unread:
        names = shorten(", ".join(table.name for table in unread))
        text = f"{names} in {root.absolute().name}/ is not read: the folders are the classes"
        best = next((table for table in unread if find_table_split(table) == "train"), unread[0])
        notes.append(f"{text}; vit train {best} reads it (--label-column NAME names its classes)")
    inner = find_split_folders(first / class_folders[0])
    if len(inner) > 1:
        names = " and ".join(f"{class_folders[0]}/{folder.name}" for folder in inner.values())
        text = f"{names} look like splits and are not used; put the classes into the splits"
        notes.append(f"{text} (train/{class_folders[0]}) to use them")
    return notes


def _read_flat_splits(
    root: Path, folders: Mapping[str, Path], class_names: Sequence[str]
) -> tuple[dict[str, FlatSplit | None], list[str]]:
    """Read the splits whose images lie in no folder of a class, but perhaps in images/.

    Args:
        root: The root.
        folders: The folders of the splits.
        class_names: Classes of the training images.

    Returns:
        Split → its images, None for test images without classes; and sentences about these.

    Raises:
        ValueError: Validation images have no classes.
    """
    flat: dict[str, FlatSplit | None] = {}
    notes: list[str] = []
    if root in folders.values():
        return flat, notes
    for split, folder in find_split_folders(root).items():
        inner = list_classes(folder)
        is_flat = not inner or (inner == ["images"] and "images" not in class_names)
        if not is_flat or not any(_find_images(folder)):
            continue
        flat[split] = read_flat_split(folder, root, class_names)
        if flat[split] is not None:
            continue
        text = f"{folder} holds images in no folder of a class"
        if split != "test":
            raise ValueError(
                f"{text}; move them into {folder.name}/<class>/, or add a file"
                f" {folder.name}_annotations.txt with the name of an image and its class a line"
            )
        notes.append(f"{text}: they are not used, and test images are taken from the others")
    return flat, notes


def check_not_packed(folder: Path) -> None:
    """Raise ValueError for a folder that holds archives and no folder of a class."""
    names = [entry.name for entry in folder.iterdir() if entry.is_file()]
    archives = [name for name in names if is_archive(name)]
    if archives and not list_classes(folder) and not any(map(is_image_name, names)):
        raise ValueError(
            f"{folder} holds no folder of a class, but the archive {min(archives)}; unpack it there"
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


def _find_splits(root: Path, classes: ClassChoice) -> dict[str, Path]:
    """Find the folder of each split; {"train": root} if the folders below the root are classes.

    Raises:
        ValueError: The folders may be splits or classes.
    """
    # a split holds folders of classes; a class may be called "train", too
    named = find_split_folders(root)
    # large folders of classes are listed once, later
    if not any(looks_like_split(folder.name) for folder in _list_folders(root)):
        return {"train": root}
    splits = {split: folder for split, folder in named.items() if list_classes(folder)}
    others = [folder for folder in _list_folders(root) if folder not in splits.values()]
    others_with_images = [folder.name for folder in others if any(_find_images(folder))]

    if not splits:
        split_like = [name for name in others_with_images if looks_like_split(name)]
        if split_like and len(split_like) == len(others_with_images):
            # sorted by name, but training images first
            folder = root / min(split_like, key=lambda name: not name.lower().startswith("train"))
            if list_classes(folder):
                names = shorten(", ".join(f"{name}/" for name in split_like))
                raise ValueError(f"{root} holds {names}: call the splits train, val and test")
            hint = suggest_names(folder) or f"; move them into {folder.name}/<class>/"
            raise ValueError(f"{folder} holds images in no folder of a class{hint}")
        for name in split_like:
            is_chosen = classes is not None and name in classes
            if not name.lower().startswith("train") and not is_chosen:
                text = f"{root} holds {name}/ beside folders of classes"
                names = ", ".join(others_with_images)
                raise ValueError(
                    f"{text}: if it is a class, say data.classes=[{shorten(names)}]; "
                    "if it is a split, move it away or sort its images into folders of classes"
                )
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


def has_classes(root: Path) -> bool:
    """Return true if the folders below a root may be classes, or splits of classes."""
    named = find_split_folders(root).values()
    if any(len(list_classes(folder)) > 1 for folder in named):
        return True
    others = [folder for folder in _list_folders(root) if not looks_like_split(folder.name)]
    # two are enough: folders may be many and large
    with_images = (folder for folder in others if any(_find_images(folder)))
    return len(list(islice(with_images, 2))) > 1


def list_classes(folder: Path) -> list[str]:
    """List the folders in a folder that may be classes, sorted by name."""
    names = [entry.name for entry in _list_folders(folder)]
    return [name for name in names if not name.startswith("__")]


def _list_folders(folder: Path) -> list[Path]:
    entries = (entry for entry in sorted(folder.iterdir()) if entry.is_dir())
    return [entry for entry in entries if not is_system_folder(entry.name)]


def _list_files(folder: Path) -> list[str]:
    """List the names of the files in a folder."""
    return [entry.name for entry in folder.iterdir() if entry.is_file()]


def _find_images(folder: Path) -> Iterator[str]:
    return filter(is_image_name, list_files(folder, left_out=[]))


def _count_unused(
    root: Path, folders: Collection[Path], *, flat: Collection[Path] = ()
) -> Counter[str]:
    """Count the files below the root that are in no folder of a class.

    Args:
        root: The root.
        folders: The folders of the splits.
        flat: The folders whose images lie in no folder of a class.
    """
    unused: Counter[str] = Counter()
    for folder in {root, *folders}:
        entries = list(folder.iterdir())
        unused += count_system_images(
            entry for entry in entries if entry.is_dir() and is_system_folder(entry.name)
        )
        files = [entry.name for entry in entries if entry.is_file()]
        if folder in flat:
            files = [name for name in files if not is_image_name(name)]
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
            raise ValueError(
                f"{folder} and {folder_at[target]} are the same folder"
                ", whose images would have two classes; remove the link"
            )
        folder_at[target] = folder

    def check_link(link: str) -> None:
        target = os.path.realpath(link)
        # the link leads to a folder above it, or to one that a link above it leads to
        if any(os.path.realpath(parent) == target for parent in Path(link).absolute().parents):
            raise ValueError(f"{link} leads back to {target}, in which it lies; remove the link")
        # find the class folder that the link leads into, from the inside out
        place = target
        while place not in folder_at and place != os.path.dirname(place):
            place = os.path.dirname(place)
        folder = folder_at.get(place)
        if folder is not None and not f"{link}/".startswith(f"{folder}/"):
            raise ValueError(
                f"{link} leads to {target}, an image or folder of {folder}; remove the link"
            )

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
        left_out: list[str] = []
        files = list(list_files(directory, left_out=left_out, check_link=check_link))
        unused += count_system_images(left_out)
        images = [file for file in files if is_image_name(file)]
        others = count_suffixes(set(files) - set(images))
        if needs_every_class and not images:
            held = f", only {describe_counts(others)}" if others else ""
            hint = "remove it, or name others in data.classes"
            if any(map(is_archive, files)):
                hint = "unpack its archive there"
            raise ValueError(f"{directory} holds no images{held}; {hint}")

        # cutting texts is many times faster than making a relative path for each image
        relative = os.path.relpath(directory, root)
        start = len(str(directory))
        # with the same names on Windows
        paths.extend((relative + image[start:]).replace(os.sep, "/") for image in images)
        counts.append(len(images))
        unused += others
    return paths, counts, unused
