"""Images whose classes are listed: by a table, a text file, or by the names of the files."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vit.data.dataset import ImageDataset, Request, SourceSplits
from vit.data.sources.base import FileReader, count_suffixes
from vit.data.sources.table_labels import number_splits


class ListedImage(NamedTuple):
    """An image in a list.

    Attributes:
        path: Path of the file, relative to the root.
        label: Name of its class; or the names of its labels, if an image may have several.
        split: "train", "validation" or "test".
        group: Images of one group stay in one split; None: the image is a group of its own.
    """

    path: str
    label: str | tuple[str, ...]
    split: str = "train"
    group: str | None = None


def find_listed(
    images: Sequence[ListedImage],
    root: Path,
    request: Request,
    *,
    origin: str,
    origins: Mapping[str, str],
    name: str = "folder",
    unused: Mapping[str, int] | None = None,
    notes: Sequence[str] = (),
    guesses: Sequence[str] = (),
    read_column: Callable[[str], Mapping[str, Any]] | None = None,
) -> SourceSplits:
    """Find the splits of listed images.

    Args:
        images: The images, in their order.
        root: Folder that holds them.
        request: Its `classes` are kept.
        origin: Name of the list, at the start of messages.
        origins: Split → the place of its images, as in a sentence. Only splits with images count.
        name: The data.name.
        unused: Number of files that aren't used, as in `SourceSplits`.
        notes: Warnings for the user.
        guesses: How the list was read, for the user.
        read_column: See `ImageDataset`.

    Raises:
        ValueError: There are fewer than two classes, or a class has no training images.
    """
    by_split: dict[str, list[ListedImage]] = {}
    for image in images:
        by_split.setdefault(image.split, []).append(image)
    labels = {split: [image.label for image in listed] for split, listed in by_split.items()}
    class_names, numbers, about_labels = number_splits(labels, request.classes, origin=origin)
    notes = (*notes, *about_labels)
    has_groups = any(image.group is not None for image in images)

    def load(split: str) -> ImageDataset:
        paths = [image.path for image in by_split[split]]
        groups = [image.group or image.path for image in by_split[split]] if has_groups else None
        dataset = ImageDataset(
            name=name,
            class_names=class_names,
            labels=numbers[split],
            ids=paths,
            groups=groups,
            reader=FileReader(root, paths),
            notes=notes,
            read_column=read_column,
        )
        return dataset.keep_classes(request.classes)

    known = {split: origins[split] for split in by_split}
    return SourceSplits(known, load, unused or {}, guesses)


def count_unlisted(root: Path, paths: Iterable[str], *, lists: Iterable[Path]) -> Counter[str]:
    """Count the files in the folders of listed images that aren't in the list.

    Args:
        root: Folder that the paths are relative to.
        paths: The listed images.
        lists: The lists themselves, which aren't counted.
    """
    listed = set(paths)
    unused: Counter[str] = Counter()
    for folder in {os.path.dirname(path) for path in listed}:
        with os.scandir(root / folder) as entries:
            files = [os.path.join(folder, entry.name) for entry in entries if entry.is_file()]
        others = [path for path in files if path not in listed and root / path not in lists]
        unused += count_suffixes(others, images="images in no row of the table")
    return unused
