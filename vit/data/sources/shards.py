"""WebDataset tar shards: `<key>.<image suffix>` and `<key>.cls` side by side in tar files.

A shard is indexed once, and an image is then read by its offset: samples are reached at random, as
with files. Shards in object storage are copied into the cache.
"""

import glob
import math
import os
import re
import tarfile
from typing import Any

import numpy as np
from braceexpand import braceexpand

from vit.data.dataset import Request
from vit.data.images import is_image_name
from vit.data.sources.base import SPLIT_OF, ImageReader
from vit.data.sources.listing import Listing
from vit.data.sources.remote import fetch_files, is_remote
from vit.runtime.arguments import hide_tokens, shorten
from vit.runtime.drive import report_drive
from vit.runtime.files import expand_home

_MAX_SHARDS = 1_000_000
# bytes of a label's file that are read
_LABEL_BYTES = 2**16


class ShardReader(ImageReader):
    """Images inside tar files on this disk."""

    def __getitem__(self, index: int) -> bytes:
        shard, offset, size = self.places[index].tolist()
        path = self.files[shard]
        with report_drive(path), open(path, "rb") as file:
            file.seek(offset)
            return file.read(size)


def find_shards(request: Request) -> Listing:
    """List the images of shards. The text of an image's label is its class, or its labels with "|"
    between them where `data.task=multilabel`.

    Args:
        request: Its root is a folder of shards, or a pattern. A folder holds <split>/*.tar or
            <split>-*.tar (train, val, test), or *.tar as one set. A pattern, also of addresses, is
            one set, with globs or braces ("shards-{000..009}.tar", "s3://bucket/*.tar").

    Raises:
        ValueError: A shard is damaged, or a label is missing.
        FileNotFoundError: There are no shards.
        OSError: Object storage can't be read.
    """
    root = os.path.expanduser(str(request.root)).rstrip("/")
    # split of each shard, its name, and its file
    shards = [
        (split, path, path) for split, each in list_by_split(root, ".tar").items() for path in each
    ]
    if is_remote(root):
        pairs = fetch_files(_expand_braces(root), request.cache_dir / "remote")
        shards = [("train", *pair) for pair in pairs]
    elif not shards:
        shards = [("train", path, path) for path in _expand_pattern(root)]
    labels: list[Any] = []
    names: list[str] = []
    splits: list[str] = []
    places: list[tuple[int, int, int]] = []
    for number, (split, shard, file) in enumerate(shards):
        images, texts = _index(file, name=shard)
        for key, (offset, size) in images.items():
            label = texts.get(key, "")
            if request.labels.task == "multilabel":
                # one label in each line, or with bars between them
                parts = label.replace("\n", "|").split("|")
                labels.append(tuple(filter(None, map(str.strip, parts))))
            elif label:
                labels.append(label)
            else:
                raise ValueError(f"{shard} has no label {key}.cls for the image {key}; add it")
            names.append(f"{shard.partition('?')[0].rpartition('/')[2]}/{key}")
            places.append((number, offset, size))
        splits += [split] * len(images)
    files = [file for _, _, file in shards]
    return Listing(
        name="webdataset",
        origin=root,
        labels=labels,
        reader=ShardReader(names, np.array(places, dtype=np.int64).reshape(-1, 3), files),
        splits=splits,
    )


def is_place(place: str) -> bool:
    """Return true for a shard, a folder of shards, a pattern or an address."""
    return (
        is_remote(place) or ".tar" in place or bool(list_by_split(str(expand_home(place)), ".tar"))
    )


def list_by_split(folder: str, suffix: str) -> dict[str, list[str]]:
    """List the files of each split in a folder, <split>/* or <split>-*; or all files in the folder
    itself as "train". Empty if there are none.

    Raises:
        ValueError: A split has several of its names.
    """
    root = glob.escape(folder)
    # other folders are not read: they may hold very many images
    top = sorted(glob.glob(f"{root}/*{suffix}"))
    inner = [path for name in SPLIT_OF for path in sorted(glob.glob(f"{root}/{name}/*{suffix}"))]
    by_name: dict[str, list[str]] = {}
    for path in inner + top:
        # "valuable-0.tar" is not "val"
        found = re.match(r"[A-Za-z]*", os.path.relpath(path, folder))
        if found and found[0].lower() in SPLIT_OF:
            by_name.setdefault(found[0], []).append(path.replace(os.sep, "/"))
    splits: dict[str, list[str]] = {}
    for name, paths in by_name.items():
        split = SPLIT_OF[name.lower()]
        if split in splits:
            raise ValueError(
                f"{folder} has several names of the {split} split; name its files alike"
            )
        splits[split] = paths
    ordered = {split: splits[split] for split in SPLIT_OF.values() if split in splits}
    return ordered or ({"train": top} if top else {})


def _expand_braces(pattern: str) -> list[str]:
    """List the names of a pattern of braces. Raises ValueError if they are too many."""
    ranges = re.findall(r"\{(-?\d+)\.\.(-?\d+)", pattern)
    # before the names are written out
    if math.prod(abs(int(end) - int(start)) + 1 for start, end in ranges) > _MAX_SHARDS:
        raise ValueError(f"{shorten(hide_tokens(pattern))} names too many shards; check its braces")
    return list(braceexpand(pattern))


def _expand_pattern(pattern: str) -> list[str]:
    """List the shards of a pattern, in its order. Raises FileNotFoundError if one is missing."""
    shards: list[str] = []
    # "{000..009}" in a name that exists is no pattern
    for name in [pattern] if os.path.isfile(pattern) else _expand_braces(pattern):
        files = [name] if os.path.isfile(name) else sorted(glob.glob(name))
        if not files or not all(map(os.path.isfile, files)):
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
                is_image = is_image_name(f"x.{suffix}") and "." not in suffix
                if (is_image and key in images) or (suffix == "cls" and key in labels):
                    raise ValueError(f"two images or labels have the key {key}")
                if is_image:
                    images[key] = (member.offset_data, member.size)
                elif suffix == "cls":
                    content = tar.extractfile(member)
                    # true for a regular file
                    assert content is not None
                    labels[key] = content.read(_LABEL_BYTES).decode().strip()
    except (tarfile.TarError, ValueError, ArithmeticError, EOFError) as error:
        raise ValueError(f"{name} is not a complete tar file of samples: {error}") from error
    if not images:
        raise ValueError(f"{name} holds no images; a sample is <key>.jpg and <key>.cls")
    return images, labels
