"""WebDataset tar shards: `<key>.<image suffix>` and `<key>.cls` side by side in tar files.

A shard is indexed once, and an image is then read by its offset: samples are reached at random, as
with files. Of a shard in object storage only the headers are read for the index, which is kept in
the cache, and then the bytes of each image that is needed, which are kept there too.
"""

from __future__ import annotations

import glob
import io
import json
import os
import re
import secrets
import shutil
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import numpy as np
from braceexpand import braceexpand
from PIL import Image

from vit.data.dataset import ImageDataset, SourceSplits
from vit.data.images import IMAGE_SUFFIXES, read_image
from vit.data.sources import remote
from vit.data.sources.base import SPLIT_NAMES, Classes, ImageReader, Root, check_class_count
from vit.data.sources.remote import StoredFile, StoredStream
from vit.runtime.arguments import shorten
from vit.runtime.documents import read_json
from vit.runtime.files import write_text

_MAX_CLASS_DIGITS = 6
_MAX_SHARDS = 1_000_000
# of a .cls file that are read
_LABEL_BYTES = 2**16
# of images from object storage that are kept
_CACHE_BYTES = 32_000_000_000


class _Sample(NamedTuple):
    key: str
    # the text of the .cls file
    label: str
    # of the image, in bytes
    offset: int
    size: int


_IndexedShard = tuple[StoredFile, list[_Sample]]


@dataclass(frozen=True, eq=False)
class ShardReader(ImageReader):
    """Images inside tar files on this disk."""

    shards: Sequence[StoredFile]
    names: Sequence[str]
    # int64 [n, 3]: shard, offset, size in bytes
    places: np.ndarray

    def image(self, index: int) -> Image.Image:
        return read_image(io.BytesIO(self._read(index)), name=self.names[index])

    def _read(self, index: int) -> bytes:
        shard, offset, size = self.places[index].tolist()
        file: StoredFile = self.shards[shard]
        return file.read(offset, offset + size)

    def sizes(self) -> np.ndarray:
        return self.places[:, 2]

    def cache_key(self) -> bytes:
        versions = [(shard.size, shard.version) for shard in self.shards]
        return repr(versions).encode() + self.places.tobytes()

    def subset(self, indices: np.ndarray) -> Self:
        places = self.places[indices]
        used, places[:, 0] = np.unique(places[:, 0], return_inverse=True)
        shards = [self.shards[shard] for shard in used]
        return replace(
            self, shards=shards, names=[self.names[index] for index in indices], places=places
        )


@dataclass(frozen=True, eq=False)
class RemoteShardReader(ShardReader):
    """Images inside tar files in object storage. The bytes of an image are kept in a folder, a file
    for each, until there are too many."""

    folder: Path
    is_remote: ClassVar[bool] = True

    def fetch(self, indices: Iterable[int]) -> None:
        missing = [index for index in indices if not self._path(index).is_file()]
        num_bytes = sum(remote.map_parallel(lambda index: len(self._download(index)), missing))
        # all processes together look about each time that a twentieth was added
        if secrets.randbelow(_CACHE_BYTES // 20 + 1) < num_bytes:
            self._delete_oldest()

    def _read(self, index: int) -> bytes:
        path = self._path(index)
        # not fetched yet, or deleted again
        with suppress(FileNotFoundError):
            content = path.read_bytes()
            os.utime(path)
            if len(content) == self.places[index, 2]:
                return content
        return self._download(index)

    def _download(self, index: int) -> bytes:
        # written beside its place: another process may read it meanwhile
        content = super()._read(index)
        path = self._path(index)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        temporary.write_bytes(content)
        temporary.replace(path)
        return content

    def _path(self, index: int) -> Path:
        shard, offset, size = self.places[index].tolist()
        file: StoredFile = self.shards[shard]
        return self.folder / file.digest / f"{offset}-{offset + size}"

    def _delete_oldest(self) -> None:
        """Of more bytes than are kept, or than are free on the disk, delete what was used longest
        ago."""
        # another process does it
        with suppress(FileNotFoundError):
            files = [(path.stat(), path) for path in self.folder.glob("*/*-*")]
            total = sum(stat.st_size for stat, _ in files)
            limit = min(_CACHE_BYTES, (total + shutil.disk_usage(self.folder).free) / 2)
            for stat, path in sorted(files, key=lambda file: file[0].st_mtime_ns):
                if total <= 0.8 * limit:
                    break
                path.unlink()
                total -= stat.st_size


def find_shards(*, root: Root, classes: Classes, cache_dir: Path) -> SourceSplits:
    """The splits of shards.

    As with image folders, val without test is the test split. Class names are the lines of
    classes.txt beside the first shard, else the labels.

    Args:
        root: a folder of shards, or a pattern. A folder holds <split>/*.tar or <split>*.tar (train,
            val, test), or *.tar as one set. A pattern is one set, of globs and braces
            ("shards-{000..009}.tar"). Both may be addresses ("s3://bucket/{000..009}.tar").
        classes: those to keep; None keeps all.
        cache_dir: takes what is read of object storage.

    Raises:
        ValueError: a shard is damaged, or a label is wrong.
        FileNotFoundError: there are no shards.
        RemoteError: object storage can't be read.
    """
    if root is None:
        text = "data.name=webdataset needs data.root"
        raise ValueError(f"{text}: a folder of .tar shards, a pattern or an address")

    # an address of a folder has no .tar in it, and can't be asked for its kind
    path = str(root)
    folder = str(Path(root).expanduser())
    if remote.is_remote(path):
        folder = path.rstrip("/")
    if os.path.isdir(folder) or (remote.is_remote(path) and ".tar" not in path):
        splits = list_shards(folder)
        origins = _describe_origins(splits, folder)
    else:
        splits = {"train": _expand(path)}
        origins = {"train": path}
    if not any(splits.values()):
        raise FileNotFoundError(f"data.root {root} holds no .tar shards")

    # all splits together, whose classes are the same, when the first of them is listed
    @cache
    def index_all() -> dict[str, _IndexedShard]:
        index = partial(_index_cached, cache_dir / "shards")
        paths = [path for paths in splits.values() for path in paths]
        return dict(zip(paths, remote.map_parallel(index, paths), strict=True))

    def load(split: str) -> ImageDataset:
        index = index_all()
        labels = {sample.label for _, samples in index.values() for sample in samples}
        class_names, number_of = _number_classes(labels, os.path.dirname(next(iter(index))))
        shards = [index[path] for path in splits[split]]
        dataset = _list_samples(shards, class_names, number_of, cache_dir / "remote")
        return dataset.keep_classes(classes)

    return SourceSplits(origins, load).with_test_split()


def list_shards(folder: str, suffix: str = ".tar") -> dict[str, list[str]]:
    """The shards of each split in a folder; {} where there are none.

    Args:
        folder: its path or address.
        suffix: of the files.
    """
    prefix = folder if remote.is_remote(folder) else glob.escape(folder)
    splits = {}
    for split, (name, *_) in SPLIT_NAMES.items():
        shards = remote.list_files(f"{prefix}/{name}*/*{suffix}")
        shards = shards or remote.list_files(f"{prefix}/{name}*{suffix}")
        if shards:
            splits[split] = shards

    shards = remote.list_files(f"{prefix}/*{suffix}")
    if shards and not splits:
        splits["train"] = shards
    return splits


def _describe_origins(splits: Mapping[str, Sequence[str]], folder: str) -> dict[str, str]:
    origins = {}
    for split, shards in splits.items():
        parent = os.path.dirname(shards[0])
        origins[split] = f"{os.path.basename(parent)}/"
        if parent == folder and len(splits) > 1:
            origins[split] = f"{SPLIT_NAMES[split][0]}*.tar"
    return origins


def _expand(pattern: str) -> list[str]:
    """The shards of a pattern, in its order."""
    if _count_names(pattern) > _MAX_SHARDS:
        text = f"stands for more than {_MAX_SHARDS:,} shards"
        raise ValueError(f"data.root {shorten(pattern)} {text}")

    shards: list[str] = []
    for name in braceexpand(pattern):
        files = remote.list_files(name)
        if not files:
            raise FileNotFoundError(f"data.root {pattern}: no file matches {name}")
        shards += files
    return shards


def _count_names(pattern: str) -> int:
    """No fewer than its braces stand for, counted before they are written out: of "{0..9}-{a,b}"
    20."""
    count = 1
    # from the inside out: a group in others is counted as if it stood beside them
    while group := re.search(r"\{([^{}]*)\}", pattern):
        numbers = re.match(r"(-?\d+)\.\.(-?\d+)", group[1])
        if numbers:
            count *= abs(int(numbers[2]) - int(numbers[1])) + 1
        elif ".." in group[1]:
            count *= 52  # letters, at most
        else:
            count *= group[1].count(",") + 1
        pattern = pattern.replace(group[0], "", 1)
    return count


def _list_samples(
    shards: Sequence[_IndexedShard],
    class_names: tuple[str, ...],
    number_of: Mapping[str, int],
    cache_folder: Path,
) -> ImageDataset:
    """The images of a split."""
    names: list[str] = []
    labels: list[int] = []
    places: list[tuple[int, int, int]] = []
    for number, (shard, samples) in enumerate(shards):
        for sample in samples:
            names.append(f"{shard.name}/{sample.key}")
            labels.append(number_of[sample.label])
            places.append((number, sample.offset, sample.size))

    # in object storage, images are kept when they were read
    files = [shard for shard, _ in shards]
    reader = ShardReader(files, names, np.array(places, dtype=np.int64))
    if remote.is_remote(files[0].path):
        reader = RemoteShardReader(files, names, reader.places, cache_folder)
    return ImageDataset(
        name="webdataset",
        class_names=class_names,
        labels=np.array(labels),
        ids=names,
        reader=reader,
    )


def _index_cached(cache_folder: Path, path: str) -> _IndexedShard:
    """`_index` of a shard, kept for the next time."""
    shard = remote.find_file(path)
    cached = cache_folder / f"{shard.digest}.json"
    try:
        samples = [_Sample(*row) for row in read_json(cached)]
    except (OSError, ValueError, TypeError):
        # there is none, or a damaged one
        samples = _index(shard)
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_text(cached, json.dumps(samples))
    return shard, samples


def _index(shard: StoredFile) -> list[_Sample]:
    """The samples of a tar file, in its order.

    Raises:
        ValueError: it is not a complete tar file, or an image has no label.
    """
    # key → offset, size
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, str] = {}
    try:
        # headers lie between images: reading far ahead would bring those too
        file = io.BufferedReader(StoredStream(shard), 2**15)
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if not member.isreg():
                    continue
                # tarfile finds out about a cut only where it reads the contents
                if not 0 <= member.size <= shard.size - member.offset_data:
                    raise ValueError("it is cut short")

                # a key ends at the first dot of the file name
                folder, slash, file_name = member.name.rpartition("/")
                stem, _, suffix = file_name.partition(".")
                key = folder + slash + stem
                if f".{suffix.lower()}" in IMAGE_SUFFIXES:
                    images[key] = (member.offset_data, member.size)
                elif suffix == "cls":
                    content = tar.extractfile(member)
                    # it is a regular file
                    assert content is not None
                    labels[key] = content.read(_LABEL_BYTES).decode().strip()
    except (tarfile.TarError, ValueError, ArithmeticError, EOFError) as error:
        raise ValueError(f"{shard.path} is not a complete tar file: {error}") from error

    if not images:
        raise ValueError(f"{shard.path} holds no images; a sample is <key>.jpg and <key>.cls")
    # empty labels count as missing
    for key in images:
        if not labels.get(key):
            raise ValueError(f"{shard.path} has no label {key}.cls for the image {key}")
    return [_Sample(key, labels[key], offset, size) for key, (offset, size) in images.items()]


def _number_classes(labels: set[str], folder: str) -> tuple[tuple[str, ...], dict[str, int]]:
    """Class names, and label → number. Labels that are numbers count the lines of classes.txt in
    the folder, if there is one."""
    class_names = sorted(labels)
    number_of = {label: number for number, label in enumerate(class_names)}
    if all(label.isdecimal() for label in labels):
        # by its digits: Python refuses to read a number of some thousand
        longest = max(labels, key=lambda label: len(label.lstrip("0")))
        if len(longest.lstrip("0")) > _MAX_CLASS_DIGITS:
            text = f"a shard has the label {shorten(longest)}"
            raise ValueError(f"{text}; numbers go up to {10**_MAX_CLASS_DIGITS - 1:,}")

        number_of = {label: int(label) for label in labels}
        largest = max(number_of.values())
        class_names = [str(number) for number in range(largest + 1)]
        path = os.path.join(folder, "classes.txt")
        names = remote.read_text(path)
        if names is not None:
            class_names = [line.strip() for line in names.splitlines() if line.strip()]
        if largest >= len(class_names):
            text = f"{path} names {len(class_names)} classes"
            raise ValueError(f"{text}, but a label is {largest}")

    check_class_count(class_names, origin=folder)
    return tuple(class_names), number_of
