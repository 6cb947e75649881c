"""WebDataset tar shards: `<key>.<image suffix>` and `<key>.cls` (or `.json` with a "label") side by
side in tar files.

A shard is indexed once, and an image is then read by its offset: samples are reached at random, as
with files. Shards in object storage are copied into the cache.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from braceexpand import braceexpand

from vit.data.dataset import Request
from vit.data.images import is_image_name
from vit.data.sources.base import (
    SPLIT_NAMES,
    ImageReader,
    count_suffixes,
    read_stats,
)
from vit.data.sources.listing import Listing, as_labels
from vit.data.sources.remote import fetch_files, is_remote, list_addresses
from vit.runtime.arguments import hide_tokens, shorten
from vit.runtime.drive import report_drive
from vit.runtime.files import expand_home

_MAX_SHARDS = 1_000_000
# bytes of a label's file that are read
_LABEL_BYTES = 2**16


class _Sample(NamedTuple):
    key: str
    # text of its label's file; None if there is none
    label: str | None
    # place of the image, in bytes
    offset: int
    size: int


@dataclass(frozen=True, eq=False)
class ShardReader(ImageReader):
    """Images inside tar files on this disk."""

    shards: Sequence[str]
    names: Sequence[str]
    # int64 [n, 3]: shard, offset, size in bytes
    places: np.ndarray

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> bytes:
        shard, offset, size = self.places[index].tolist()
        path = self.shards[shard]
        with report_drive(path), open(path, "rb") as file:
            file.seek(offset)
            return file.read(size)

    def subset(self, indices: np.ndarray) -> ShardReader:
        names = [self.names[index] for index in indices]
        return replace(self, names=names, places=self.places[indices])

    def get_name(self, index: int) -> str:
        return self.names[index]

    @property
    def place(self) -> str:
        return os.path.realpath(self.shards[0])

    def stats(self) -> np.ndarray:
        # the shard's facts and the place in it
        stats: np.ndarray = read_stats(self.shards)[self.places[:, 0]]
        stats[:, 0] = self.places[:, 1]
        return stats

    def sizes(self) -> np.ndarray:
        return self.places[:, 2]


def find_shards(request: Request) -> Listing:
    """List the images of shards.

    As with image folders, val without test is the test split. Labels name the classes.

    Args:
        request: Its root is a folder of shards, or a pattern. A folder holds <split>/*.tar or
            <split>-*.tar (train, val, test), or *.tar as one set. A pattern is one set, of globs
            and braces ("shards-{000..009}.tar"). Both may be addresses
            ("s3://bucket/{000..009}.tar").

    Raises:
        ValueError: A shard is damaged, or a label is wrong.
        FileNotFoundError: There are no shards.
        RemoteError: Object storage can't be read.
    """
    path = os.path.expanduser(str(request.root)).rstrip("/")
    # object storage can't be asked whether an address is a folder
    if not os.path.isdir(path) and (not is_remote(path) or ".tar" in path):
        by_split = {"train": expand_pattern(path)}
    else:
        by_split = list_shards(path)
    if not by_split:
        raise FileNotFoundError(f"data.root {request.root} holds no .tar shards; check the path")
    shards = [shard for each in by_split.values() for shard in each]
    files = fetch_files(shards, request.cache_dir / "remote") if is_remote(path) else shards
    labels: list[Any] = []
    names: list[str] = []
    places: list[tuple[int, int, int]] = []
    counts: list[int] = []
    several = request.labels.task == "multilabel"
    for number, (shard, file) in enumerate(zip(shards, files, strict=True)):
        shard = hide_tokens(shard)
        samples = _index(file, name=shard)
        counts.append(len(samples))
        for sample in samples:
            if request.needs_labels:
                labels.append(_read_label(sample, shard, several=several))
            names.append(f"{shard.partition('?')[0].rpartition('/')[2]}/{sample.key}")
            places.append((number, sample.offset, sample.size))
    if any(isinstance(label, tuple) for label in labels):
        labels = [label if isinstance(label, tuple) else (label,) for label in labels]
    split_of = [split for split, each in by_split.items() for _ in each]
    return Listing(
        name="webdataset",
        origin=path,
        ids=names,
        labels=labels,
        reader=ShardReader(files, names, np.array(places, dtype=np.int64).reshape(-1, 3)),
        splits=np.repeat(split_of, counts).tolist(),
        origins={
            split: f"{SPLIT_NAMES[split][0]}*" if len(by_split) > 1 else path for split in by_split
        },
    )


def is_place(place: str) -> bool:
    """Return true for a shard, a folder of shards, a pattern or an address."""
    path = expand_home(place)
    return is_remote(place) or ".tar" in place or (path.is_dir() and bool(list_shards(str(path))))


def _read_label(sample: _Sample, shard: str, *, several: bool) -> str | tuple[str, ...]:
    text = sample.label
    if text is not None and text.startswith("["):
        return as_labels([str(value) for value in json.loads(text)])
    if several:
        return tuple(filter(None, map(str.strip, re.split(r"[|\n]", text or ""))))
    if not text:
        raise ValueError(
            f"{shard} has no label {sample.key}.cls for the image {sample.key}; write its class, a"
            f" name or a number, into {sample.key}.cls"
        )
    return text


def list_shards(folder: str, suffix: str = ".tar") -> dict[str, list[str]]:
    """List the shards of each split in a folder; {} if there are none.

    Args:
        folder: Path or address of the folder.
        suffix: Suffix of the files.

    Raises:
        ValueError: Shards of a split have several of its names.
    """
    # split → its name there ("val/" or "val-") → shards
    named: dict[str, dict[str, list[str]]] = {split: {} for split in SPLIT_NAMES}
    top = _glob(folder, f"*{suffix}")
    for split, names in SPLIT_NAMES.items():
        # other folders are not read: they may hold very many images
        for path in _glob(folder, f"{names[0]}*/*{suffix}") + top:
            relative = path[len(folder) :].lstrip("/")
            # "valuable-0.tar" is not "val"
            name, mark = re.match(r"([A-Za-z]*)(/?)", relative).groups()  # type: ignore[union-attr]
            if name.lower() in names:
                named[split].setdefault(name + mark, []).append(path)
    splits = {}
    for split, shards in named.items():
        if len(shards) > 1:
            raise ValueError(
                f"{folder} holds shards named {' and '.join(map(repr, shards))}"
                f", all of the {split} split; name them alike"
            )
        for paths in shards.values():
            splits[split] = paths
    if not splits and top:
        splits["train"] = top
    return splits


def _glob(folder: str, pattern: str) -> list[str]:
    if is_remote(folder):
        return list_addresses(f"{folder}/{pattern}")
    return sorted(
        path.replace(os.sep, "/") for path in glob.glob(f"{glob.escape(folder)}/{pattern}")
    )


def expand_pattern(pattern: str) -> list[str]:
    """List the shards of a pattern, in its order."""
    shards: list[str] = []
    ranges = re.findall(r"\{(-?\d+)\.\.(-?\d+)", pattern)
    # before the names are written out
    if math.prod(abs(int(end) - int(start)) + 1 for start, end in ranges) > _MAX_SHARDS:
        text = f"names more than {_MAX_SHARDS:,} shards; check its braces"
        raise ValueError(f"data.root {shorten(hide_tokens(pattern))} {text}")
    # "{000..009}" in a name that exists is no pattern
    names = [pattern] if os.path.isfile(pattern) else braceexpand(pattern)
    for name in names:
        files = [name]
        if is_remote(name):
            files = list_addresses(name) if "*" in name else [name]
        elif not os.path.isfile(name):
            files = sorted(path.replace(os.sep, "/") for path in glob.glob(name))
        if not files:
            raise FileNotFoundError(f"data.root {hide_tokens(pattern)}: no file matches {name}")
        shards += files
    return shards


def _index(file: str, *, name: str) -> list[_Sample]:
    """Read the samples of a tar file, in its order.

    Raises:
        ValueError: It is not a complete tar file, or a key has two images or labels.
    """
    # key → offset, size
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, str] = {}
    others: list[str] = []
    try:
        total = os.path.getsize(file)
        with tarfile.open(file, mode="r:") as tar:
            for member in tar:
                if not member.isreg():
                    continue
                # tarfile notices a cut only when it reads the contents
                if not 0 <= member.size <= total - member.offset_data:
                    raise ValueError("it is cut short")
                # a key ends at the first dot of the file name
                folder, slash, file_name = member.name.rpartition("/")
                stem, _, suffix = file_name.partition(".")
                key = folder + slash + stem
                found: dict[str, object] = labels if suffix in ("cls", "json") else images  # type: ignore[assignment]
                is_image = is_image_name(f"x.{suffix}") and "." not in suffix
                if key in found and (is_image or suffix == "cls"):
                    raise ValueError(f"two images or labels have the key {key}")
                if is_image:
                    images[key] = (member.offset_data, member.size)
                elif suffix in ("cls", "json"):
                    content = tar.extractfile(member)
                    # true for a regular file
                    assert content is not None
                    text = content.read(_LABEL_BYTES).decode().strip()
                    label = _read_json(text) if suffix == "json" else text
                    if label is not None:
                        labels.setdefault(key, label)
                else:
                    others.append(member.name)
    except (tarfile.TarError, ValueError, ArithmeticError, EOFError) as error:
        raise ValueError(f"{name} is not a complete tar file of samples: {error}") from error
    if not images:
        held = ", ".join(count_suffixes(others)) or "nothing"
        raise ValueError(
            f"{name} holds no images <key>.jpg, only {held}; a sample is <key>.jpg and <key>.cls"
        )
    return [_Sample(key, labels.get(key), *place) for key, place in images.items()]


def _read_json(text: str) -> str | None:
    """Return the "label" of a .json file, a list of labels as JSON; None if there is none."""
    content = json.loads(text)
    label = content.get("label") if isinstance(content, dict) else None
    if isinstance(label, list):
        return json.dumps(label, ensure_ascii=False)
    return str(label) if isinstance(label, str | int) and not isinstance(label, bool) else None
