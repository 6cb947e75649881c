"""WebDataset tar shards: `<key>.<image suffix>` and `<key>.cls` side by side in tar files.

A shard is indexed once, and an image is then read by its offset: samples are reached at random, as
with files.
"""

import glob
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from braceexpand import braceexpand

from vit.data.dataset import ImageRule
from vit.data.images import is_image_name
from vit.data.sources.base import SPLIT_OF, ImageReader, Listing, read_stats
from vit.runtime.drive import report_drive
from vit.runtime.files import expand_home

# bytes of a label's file that are read
_LABEL_BYTES = 2**16


class ShardReader(ImageReader):
    """Images inside tar files on this disk. `places` has the number of the file, the place in it,
    and the size in bytes, int64 [n, 3]."""

    def __init__(self, files: Sequence[str], names: Sequence[str], places: np.ndarray) -> None:
        super().__init__(names, places)
        self.files = files
        self.place = os.path.realpath(files[0])

    def __getitem__(self, index: int) -> bytes:
        shard, offset, size = self.places[index].tolist()
        path = self.files[shard]
        with report_drive(path), open(path, "rb") as file:
            file.seek(offset)
            return file.read(size)

    def stats(self) -> np.ndarray:
        shards, offsets, sizes = self.places.T
        return np.column_stack([sizes, read_stats(self.files)[shards], offsets])


def find_shards(place: Path | str, rule: ImageRule) -> Listing:
    """List the images of shards: those of a folder, see `list_by_split`, or of a pattern with globs
    or braces ("shards-{000..009}.tar"). Several labels in one text have "|" between them. Raises
    ValueError for a damaged shard or a missing label, and OSError if there are no shards."""
    root = os.path.expanduser(str(place)).rstrip("/")
    # opening a file that is missing names it
    found = [file for name in braceexpand(root) for file in sorted(glob.glob(name)) or [name]]
    by_split = list_by_split(root, ".tar") or {"train": found}
    shards = [(split, file) for split, files in by_split.items() for file in files]
    labels: list[Any] = []
    names: list[str] = []
    splits: list[str] = []
    places: list[tuple[int, int, int]] = []
    for number, (split, file) in enumerate(shards):
        for key, offset, size, label in _index(file):
            if rule.task == "multilabel":
                labels.append(tuple(filter(None, map(str.strip, label.split("|")))))
            elif label:
                labels.append(label)
            else:
                raise ValueError(f"{file} has no label {key}.cls for the image {key}; add it")
            names.append(f"{os.path.basename(file)}/{key}")
            places.append((number, offset, size))
            splits.append(split)
    reader = ShardReader([file for _, file in shards], names, np.array(places, dtype=np.int64))
    return Listing(labels=labels, reader=reader, splits=splits)


def is_place(place: str) -> bool:
    """Return true for a shard, a folder of shards, or a pattern."""
    path = expand_home(place)
    # an unpacked archive's folder may be called photos.tar
    is_pattern = ".tar" in place and "://" not in place and not os.path.isdir(path)
    return is_pattern or bool(list_by_split(str(path), ".tar"))


def list_by_split(folder: str, suffix: str) -> dict[str, list[str]]:
    """List the files of each split in a folder, <split>/* or <split>-*; or all files in the folder
    itself as "train". Empty if there are none."""
    root = glob.escape(folder)
    # other folders are not read: they may hold very many images
    top = sorted(glob.glob(f"{root}/*{suffix}"))
    inner = [path for name in SPLIT_OF for path in sorted(glob.glob(f"{root}/{name}/*{suffix}"))]
    splits: dict[str, list[str]] = {split: [] for split in SPLIT_OF.values()}
    for path in inner + top:
        # "valuable-0.tar" is not "val"
        name = re.split("[^A-Za-z]", os.path.relpath(path, folder))[0].lower()
        if name in SPLIT_OF:
            splits[SPLIT_OF[name]].append(path)
    named = {split: paths for split, paths in splits.items() if paths}
    if top and not named:
        return {"train": top}
    return named


def _index(file: str) -> Iterator[tuple[str, int, int, str]]:
    """Yield the samples of a tar file, in its order: key, place and size of the image, and label.
    Raises ValueError if it isn't complete, or a key has two images or labels."""
    images: dict[str, Any] = {}
    labels: dict[str, Any] = {}
    try:
        total = os.path.getsize(file)
        with tarfile.open(file, mode="r:") as tar:
            for member in filter(tarfile.TarInfo.isreg, tar):
                # tarfile notices a cut only when it reads the contents
                if not 0 <= member.size <= total - member.offset_data:
                    raise ValueError("it is cut short")
                # a key ends at the first dot of the file name
                match = re.fullmatch(r"((?:.*/)?[^/.]*)[.]([^/.]*)", member.name, re.DOTALL)
                known = images
                if match and match[2] == "cls":
                    known = labels
                elif match is None or not is_image_name(f"x.{match[2]}"):
                    continue
                if match[1] in known:
                    raise ValueError(f"two images or labels have the key {match[1]}")
                known[match[1]] = member
            for key, image in images.items():
                label = ""
                if key in labels:
                    content: Any = tar.extractfile(labels[key])
                    label = content.read(_LABEL_BYTES).decode().strip()
                yield key, image.offset_data, image.size, label
        if not images:
            raise ValueError("it holds no images; a sample is <key>.jpg and <key>.cls")
    except (tarfile.TarError, ValueError, ArithmeticError, EOFError) as error:
        raise ValueError(f"{file} is not a complete tar file of samples: {error}") from error
