"""Published sets in the folders that their archives unpack to, and sets that are split by text
files. Each is recognised by its files."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from vit.data.dataset import Request, Source, SourceSplits, root_exists
from vit.data.sources.base import SPLIT_OF
from vit.data.sources.folders import has_classes
from vit.data.sources.listed import ListedImage, count_unlisted, find_listed
from vit.runtime.arguments import shorten
from vit.runtime.files import expand_home, read_text

_CUB_FILES = ("images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt")
_PETS_FILES = ("annotations/trainval.txt", "annotations/test.txt", "images")
# train.txt, train800.txt, val_list.txt, …; "train800val200.txt" is training and validation
_LIST = re.compile(rf"({'|'.join(SPLIT_OF)})(.*)\.(?:txt|lst)")


def find_cub(request: Request) -> SourceSplits:
    """Find the splits of CUB-200-2011, or of NABirds, which has the same files."""
    root = request.place
    paths, labels, is_train, names = (_read_pairs(root / name) for name in _CUB_FILES)
    images = []
    for key, path in paths.items():
        label = names.get(labels.get(key, ""))
        if label is None or key not in is_train:
            raise ValueError(f"{root}: image {key} has no class or no split; unpack it again")
        split = "train" if is_train[key] == "1" else "test"
        images.append(ListedImage(f"images/{path}", label, split))
    return _find_images(
        images,
        request,
        name="cub200",
        origins={"train": "train_test_split.txt (1)", "test": "train_test_split.txt (0)"},
    )


def find_pets(request: Request) -> SourceSplits:
    """Find the splits of the Oxford-IIIT pets, with torchvision's names of the classes."""
    root = request.place
    images = []
    for split, name in (("train", "trainval"), ("test", "test")):
        for image in _read_pairs(root / f"annotations/{name}.txt"):
            words = image.rpartition("_")[0].split("_")
            label = " ".join(word.title() for word in words)
            images.append(ListedImage(f"images/{image}.jpg", label, split))
    origins = {"train": "annotations/trainval.txt", "test": "annotations/test.txt"}
    return _find_images(images, request, name="oxford_pets", origins=origins)


def find_lists(request: Request) -> SourceSplits:
    """Find the splits of a set with a text file for each split: the path of an image and its class
    a line, as in VTAB.

    Raises:
        ValueError: Several files may be the same split.
    """
    root = request.place
    lists = _list_files(root)
    images = [
        ListedImage(name, label, split)
        for split, path in lists.items()
        for name, label in _read_list(path).items()
    ]
    origins = {split: path.name for split, path in lists.items()}
    names = {path.name for path in root.iterdir() if _LIST.fullmatch(path.name.lower())}
    left_out = sorted(names.difference(origins.values()))
    guesses = [f"{', '.join(left_out)} not read"] if left_out else []
    return _find_images(images, request, name="text_lists", origins=origins, guesses=guesses)


def _list_files(root: Path) -> dict[str, Path]:
    """Find the text file of each split in a folder."""
    found: dict[str, list[Path]] = {}
    for path in sorted(root.iterdir()):
        match = _LIST.fullmatch(path.name.lower())
        if match and path.is_file() and _names_images(path):
            split = SPLIT_OF[match[1]]
            # training and validation together
            key = "both" if split == "train" and "val" in match[2] else split
            found.setdefault(key, []).append(path)
    both = found.pop("both", [])
    if both:
        found.setdefault("train", both)
    for split, paths in found.items():
        if len(paths) > 1:
            names = ", ".join(path.name for path in paths)
            raise ValueError(f"{root} holds several lists of the {split} split: {names}; keep one")
    return {split: paths[0] for split, paths in found.items()} if "train" in found else {}


def _names_images(path: Path) -> bool:
    """Return true if the first line of a file is an image below its folder, and a class."""
    with path.open("rb") as file:
        parts = file.readline(4096).decode(errors="replace").strip().rsplit(None, 1)
    return len(parts) == 2 and (path.parent / parts[0]).is_file()


def _read_list(path: Path) -> Mapping[str, str]:
    rows: dict[str, str] = {}
    wrong: list[str] = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        name, *label = line.strip().rsplit(None, 1) or [""]
        if name and (not label or rows.setdefault(name, label[0]) != label[0]):
            wrong.append(f"line {number}: {shorten(line, 60)}")
    if wrong:
        raise ValueError(
            f"{path} has {len(wrong)} lines without a class, or with a second one for an image"
            f": {', '.join(wrong[:10])}; correct them"
        )
    return rows


def _read_pairs(path: Path) -> dict[str, str]:
    """Read lines of a key and a value: "1 001.Black_footed_Albatross"."""
    lines = (line.split(maxsplit=1) for line in read_text(path).splitlines() if line.strip())
    return {key: "".join(value).strip() for key, *value in lines}


def _find_images(
    images: list[ListedImage],
    request: Request,
    *,
    name: str,
    origins: Mapping[str, str],
    guesses: Sequence[str] = (),
) -> SourceSplits:
    """Find the splits of listed images, all of which must be there."""
    root = request.place
    missing = [image.path for image in images if not (root / image.path).is_file()]
    if missing:
        raise ValueError(
            f"{len(missing):,} of {len(images):,} images listed in {root} are missing"
            f", such as {missing[0]}; unpack the archive again"
        )
    unused = count_unlisted(root, (image.path for image in images), lists=())
    return find_listed(
        images,
        root,
        request,
        origin=str(root),
        origins=origins,
        name=name,
        unused=unused,
        guesses=guesses,
    )


def _has(names: Sequence[str], place: str) -> bool:
    return all((expand_home(place) / name).exists() for name in names)


def _is_listed(place: str) -> bool:
    root = expand_home(place)
    # folders of classes tell more than lists of their numbers
    return root.is_dir() and bool(_list_files(root)) and not has_classes(root)


SOURCES = tuple(
    Source(name, find, recognizes=recognizes, needs_root=True, is_here=root_exists, unit="files")
    for name, find, recognizes in (
        ("cub200", find_cub, partial(_has, _CUB_FILES)),
        ("oxford_pets", find_pets, partial(_has, _PETS_FILES)),
        ("text_lists", find_lists, _is_listed),
    )
)
