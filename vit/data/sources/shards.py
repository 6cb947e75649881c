"""WebDataset tar shards: `<key>.<image suffix>` and `<key>.cls` side by side in tar files.

A shard is indexed once, and an image is then read by its offset: samples are reached at random, as
with files. Shards in object storage are copied into the cache.
"""

import glob
import os
import re
import tarfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from braceexpand import braceexpand

from vit.data.dataset import Request
from vit.data.images import is_image_name
from vit.data.sources.base import SPLIT_OF, ImageReader, read_stats
from vit.data.sources.listing import Listing
from vit.data.sources.remote import fetch_files, is_remote
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

    def __getitem__(self, index: int) -> bytes:
        shard, offset, size = self.places[index].tolist()
        path = self.files[shard]
        with report_drive(path), open(path, "rb") as file:
            file.seek(offset)
            return file.read(size)

    @property
    def place(self) -> str:
        return os.path.realpath(self.files[0])

    def stats(self) -> np.ndarray:
        stats: np.ndarray = read_stats(self.files)[self.places[:, 0]]
        stats[:, 0] = self.places[:, 1]
        return stats

    def sizes(self) -> np.ndarray:
        sizes: np.ndarray = self.places[:, 2]
        return sizes


def find_shards(request: Request) -> Listing:
    """List the images of shards. The text of an image's label is its class, or its labels with "|"
    between them where `data.task=multilabel`.

    Args:
        request: Its root is a folder of shards, or a pattern. A folder holds <split>/*.tar or
            <split>-*.tar (train, val, test), or *.tar as one set. A pattern, also of addresses, is
            one set, with globs or braces ("shards-{000..009}.tar", "s3://bucket/*.tar").

    Raises:
        ValueError: A shard is damaged, or a label is missing.
        OSError: There are no shards, or they can't be read.
    """
    root = os.path.expanduser(str(request.root)).rstrip("/")
    # split of each shard, its name, and its file
    if is_remote(root):
        pairs = fetch_files(list(braceexpand(root)), request.cache_dir / "remote")
        shards = [("train", *pair) for pair in pairs]
    else:
        by_split = list_by_split(root, ".tar") or {"train": _expand_pattern(root)}
        shards = [(split, path, path) for split, each in by_split.items() for path in each]
    labels: list[Any] = []
    names: list[str] = []
    splits: list[str] = []
    places: list[tuple[int, int, int]] = []
    for number, (split, shard, file) in enumerate(shards):
        images, texts = _index(file, name=shard)
        for key, (offset, size) in images.items():
            label = texts.get(key, "")
            if request.labels.task == "multilabel":
                labels.append(tuple(filter(None, map(str.strip, label.split("|")))))
            elif label:
                labels.append(label)
            else:
                raise ValueError(f"{shard} has no label {key}.cls for the image {key}; add it")
            names.append(f"{shard.partition('?')[0].rpartition('/')[2]}/{key}")
            places.append((number, offset, size))
            splits.append(split)
    files = [file for _, _, file in shards]
    reader = ShardReader(files, names, np.array(places, dtype=np.int64))
    return Listing(name="webdataset", origin=root, labels=labels, reader=reader, splits=splits)


def is_place(place: str) -> bool:
    """Return true for a shard, a folder of shards, a pattern or an address."""
    return (
        is_remote(place) or ".tar" in place or bool(list_by_split(str(expand_home(place)), ".tar"))
    )


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
        found = re.match(r"[A-Za-z]*", os.path.relpath(path, folder))
        if found and found[0].lower() in SPLIT_OF:
            splits[SPLIT_OF[found[0].lower()]].append(path.replace(os.sep, "/"))
    named = {split: paths for split, paths in splits.items() if paths}
    return named or ({"train": top} if top else {})


def _expand_pattern(pattern: str) -> list[str]:
    """List the shards of a pattern, in its order. Raises FileNotFoundError if one is missing."""
    shards: list[str] = []
    for name in braceexpand(pattern):
        files = sorted(filter(os.path.isfile, glob.glob(name) or [name]))
        if not files:
            raise FileNotFoundError(f"data.root {name} names no shards (.tar); check the path")
        shards += [file.replace(os.sep, "/") for file in files]
    return shards


def _index(file: str, *, name: str) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
    """Read the samples of a tar file, in its order: key → place and size of its image, and key →
    label.

    Raises:
        ValueError: It is not a complete tar file, or a key has two images or labels.
    """
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, str] = {}
    try:
        total = os.path.getsize(file)
        with tarfile.open(file, mode="r:") as tar:
            for member in filter(tarfile.TarInfo.isreg, tar):
                # tarfile notices a cut only when it reads the contents
                if not 0 <= member.size <= total - member.offset_data:
                    raise ValueError("it is cut short")
                # a key ends at the first dot of the file name
                folder, slash, file_name = member.name.rpartition("/")
                stem, _, suffix = file_name.partition(".")
                key = folder + slash + stem
                is_label = suffix == "cls"
                if not is_label and ("." in suffix or not is_image_name(f"x.{suffix}")):
                    continue
                if key in (labels if is_label else images):
                    raise ValueError(f"two images or labels have the key {key}")
                if is_label:
                    # None for another kind of member
                    content: Any = tar.extractfile(member)
                    labels[key] = content.read(_LABEL_BYTES).decode().strip()
                else:
                    images[key] = (member.offset_data, member.size)
        if not images:
            raise ValueError("it holds no images; a sample is <key>.jpg and <key>.cls")
    except (tarfile.TarError, ValueError, ArithmeticError, EOFError) as error:
        raise ValueError(f"{name} is not a complete tar file of samples: {error}") from error
    return images, labels
