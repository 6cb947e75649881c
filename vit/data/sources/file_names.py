"""Images whose class is in their path, such as cat.0.jpg, found by a regular expression."""

import re
from collections import Counter
from pathlib import Path

from vit.data.dataset import Request, SourceSplits
from vit.data.images import is_image_name, list_files
from vit.data.sources.base import (
    SPLIT_OF,
    count_suffixes,
    count_system_images,
    describe_counts,
    relative_path,
)
from vit.data.sources.listed import ListedImage, find_listed
from vit.runtime.arguments import shorten
from vit.runtime.patterns import check_pattern, search_group

# proposed where most names have two classes or more of several images: cat.0.jpg (where all names
# are so), red_fox_12.jpg or cat (12).jpg, 0012-cat.jpg
_PLAIN_NAME = r"[A-Za-z]+[._-]?[0-9]+\.\w+"
_PLAIN_PROPOSAL = r"([A-Za-z]+)[._-]?[0-9]+\."
_PROPOSALS = (
    r"([^/]*[^/0-9_. (-])[_. (-]*[0-9]+\)?\.[^./]+$",
    r"[0-9]+[_. -]+([^/0-9]+)\.[^./]+$",
)
# names that are looked at for a proposal
_SAMPLE = 2000


def find_by_name(root: Path, label_by: str, request: Request) -> SourceSplits:
    """Find the splits of images whose class is in their path.

    Args:
        root: Folder of the images. Those in its folders train/, val/ and test/ are these splits.
        label_by: Regular expression with one group, which is searched in the path below `root`.
        request: Its `classes` are kept.

    Raises:
        ValueError: The expression is wrong, or finds no class.
    """
    # before images are listed
    check_pattern(label_by, name="data.label_by")
    left_out: list[str] = []
    files = [relative_path(file, root) for file in list_files(root, left_out=left_out)]
    paths = sorted(filter(is_image_name, files))
    labels = search_group(label_by, paths, name="data.label_by")
    found = {path: label for path, label in zip(paths, labels, strict=True) if label}
    if not found:
        example = f"paths such as {shorten(paths[0])!r}" if paths else f"{root}, without images"
        raise ValueError(f"data.label_by {label_by!r} finds no class in {example}; try another one")

    if {label.lower() for label in found.values()} <= SPLIT_OF.keys():
        names = " and ".join(sorted(set(found.values())))
        raise ValueError(f"data.label_by {label_by!r} finds {names}, which are splits; correct it")
    splits = [SPLIT_OF.get(path.partition("/")[0].lower(), "") for path in found]
    # folders of other names would have no split
    has_splits = all(splits) and "train" in splits
    if not has_splits:
        splits = ["train"] * len(found)
    images = [
        ListedImage(path, label, split)
        for (path, label), split in zip(found.items(), splits, strict=True)
    ]
    unused = count_suffixes(file for file in files if not is_image_name(file))
    unused += count_system_images(left_out)
    notes = []
    others = [path for path in paths if path not in found]
    if others:
        unused["images without a class in their path"] = len(others)
        text = f"{len(others):,} images have no class by data.label_by, such as {others[0]}"
        notes.append(f"{text}; they are not used")
    place = root.absolute().name
    source = find_listed(
        images,
        root,
        request,
        origin=f"data.label_by {label_by!r}",
        origins={
            image.split: f"{image.path.partition('/')[0] if has_splits else place}/"
            for image in images
        },
        unused=unused,
        notes=notes,
    )
    return source.with_test_split()


def suggest_names(folder: Path) -> str:
    """Suggest an expression for the classes in the names of the images in a folder; "" if they
    have none."""
    names = sorted(entry.name for entry in folder.iterdir() if is_image_name(entry.name))
    step = max(1, len(names) // _SAMPLE)
    names = names[::step]
    is_plain = all(re.fullmatch(_PLAIN_NAME, name) for name in names)
    for pattern in (_PLAIN_PROPOSAL,) if is_plain else _PROPOSALS:
        matches = [re.search(pattern, name) for name in names]
        counts = Counter(match[1] for match in matches if match)
        # names of cameras, such as IMG_0001, are one class
        is_likely = len(counts) > 1 and min(counts.values()) > 1
        if is_likely and counts.total() > 0.9 * len(names) and len(counts) < len(names) / 3:
            classes = shorten(describe_counts(counts), 80)
            return f"; their names look like classes ({classes}): --label-by '{pattern}'"
    return ""
