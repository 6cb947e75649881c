"""WebDataset tar shards: `<key>.<image suffix>` and `<key>.cls` side by side in tar files.

A shard is indexed once, and an image is then read by its offset: samples are reached at random, as
with files. Shards in object storage are copied into the cache when they are first needed, and again
when an S3 store or the Hub has another version.
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
from vit.runtime.arguments import first_line, hide_tokens, shorten
from vit.runtime.drive import report_drive
from vit.runtime.files import default_cache_dir, expand_home
from vit.runtime.locks import lock_file

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
    or braces, also of addresses ("shards-{000..009}.tar", "s3://bucket/*.tar"). Several labels in
    one text have "|" between them. Raises ValueError for a damaged shard or a missing label, and
    OSError if there are no shards."""
    root = os.path.expanduser(str(place)).rstrip("/")
    patterns = list(braceexpand(root))
    # split of each shard, its name, and its file
    if is_remote(root):
        shards = [("train", *pair) for pair in _fetch_files(patterns)]
    else:
        # opening a file that is missing names it
        files = [file for name in patterns for file in sorted(glob.glob(name)) or [name]]
        by_split = list_by_split(root, ".tar") or {"train": files}
        shards = [
            (split, file.replace(os.sep, "/"), file)
            for split, files in by_split.items()
            for file in files
        ]
    if not shards:
        raise FileNotFoundError(f"{root} names no shards; check it")
    labels: list[Any] = []
    names: list[str] = []
    splits: list[str] = []
    places: list[tuple[int, int, int]] = []
    for number, (split, shard, file) in enumerate(shards):
        for key, offset, size, label in _index(file, name=shard):
            if rule.task == "multilabel":
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
    return Listing(labels=labels, reader=reader, splits=splits)


def is_place(place: str) -> bool:
    """Return true for a shard, a folder of shards, a pattern or an address."""
    path = expand_home(place)
    # an unpacked archive's folder may be called photos.tar
    is_pattern = ".tar" in place and not os.path.isdir(path)
    return is_remote(place) or is_pattern or bool(list_by_split(str(path), ".tar"))


def is_remote(path: object) -> bool:
    """Return true for an address, of any scheme."""
    return re.match(r"\w[\w+.-]*://", str(path)) is not None


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


def _fetch_files(addresses: Sequence[str]) -> list[tuple[str, str]]:
    """Copy files into the cache, and return the address and the path of each. An address may be a
    pattern with an asterisk. Raises OSError if one can't be read."""
    import fsspec

    cache_dir = default_cache_dir() / "remote"
    cache_dir.mkdir(parents=True, exist_ok=True)
    try:
        # two processes would write the same file
        with lock_file(cache_dir / "lock"):
            # a question mark in an address is no pattern
            opened = fsspec.open_files(
                [f"filecache::{each}" for each in addresses],
                expand=any("*" in each for each in addresses),
                filecache={"cache_storage": str(cache_dir), "check_files": True},
            )
            with opened as files:
                pairs = zip(opened, files, strict=True)
                return [(hide_tokens(each.path), file.name) for each, file in pairs]
    except Exception as error:
        # each client has its own types of errors; http's cause is more exact
        reason = shorten(hide_tokens(first_line(error.__cause__ or error)))
        # without the cause: its text has the whole address
        raise OSError(
            f"{shorten(hide_tokens(addresses[0]))} and others can't be read: {reason}; s3:// and"
            " https:// need pip install '.[remote]' in the clone of vit"
        ) from None


def _index(file: str, *, name: str) -> Iterator[tuple[str, int, int, str]]:
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
        raise ValueError(f"{name} is not a complete tar file of samples: {error}") from error
