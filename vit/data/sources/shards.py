"""WebDataset tar shards: `<key>.<image suffix>` and `<key>.cls` (or .json, .txt) side by side in tar
files.

A shard is indexed once, and an image is then read by its offset: samples are reached at random, as
with files. For the index of a shard in object storage only the headers are downloaded; then the
bytes of each image that is needed. Both are kept in the cache.
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
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import numpy as np
from braceexpand import braceexpand
from PIL import Image

from vit.data.dataset import ImageDataset, Request, Source, SourceSplits
from vit.data.images import is_image_name, read_image, read_pixels
from vit.data.sources import remote
from vit.data.sources.base import (
    SPLIT_NAMES,
    ImageReader,
    count_suffixes,
    describe_counts,
    hash_bytes,
)
from vit.data.sources.remote import StoredFile
from vit.data.sources.table_labels import check_several, find_label_column, number_splits
from vit.runtime.arguments import hide_tokens, shorten
from vit.runtime.files import default_cache_dir, expand_home, open_cached, read_arrays, write_arrays

_MAX_SHARDS = 1_000_000
# suffixes of files with labels, the first that is there counts
_LABEL_SUFFIXES = ("cls", "json", "txt")
# keys of labels in a .json file
_LABEL_KEYS = ("labels", "label", "classes", "class", "cls")
# bytes of such a file that are read
_LABEL_BYTES = 2**16
# bytes of images from object storage that are kept in the cache
_CACHE_BYTES = 32_000_000_000
# a CRC-32 behind the bytes of each of them
_CHECKSUM_BYTES = 4


class _Sample(NamedTuple):
    key: str
    # the text of its file
    label: str
    # place of the image, in bytes
    offset: int
    size: int
    # suffix of the label's file; empty if there is none
    suffix: str = "cls"


@dataclass(frozen=True, eq=False)
class ShardReader(ImageReader):
    """Images inside tar files on this disk."""

    shards: Sequence[StoredFile]
    names: Sequence[str]
    # int64 [n, 3]: shard, offset, size in bytes
    places: np.ndarray
    has_small_subsets: ClassVar[bool] = True

    def image(self, index: int) -> Image.Image:
        return read_image(io.BytesIO(self.load(index)), name=self.names[index])

    def decode(self, index: int) -> Image.Image | np.ndarray:
        return read_pixels(io.BytesIO(self.load(index)), name=self.names[index])

    def load(self, index: int) -> bytes:
        """Read the file of an image."""
        shard, start, end = self._find(index)
        return shard.read(start, end)

    def _find(self, index: int) -> tuple[StoredFile, int, int]:
        """Find the shard of an image, and where its bytes start and end there."""
        shard, offset, size = self.places[index].tolist()
        return self.shards[shard], offset, offset + size

    def __len__(self) -> int:
        return len(self.places)

    @property
    def place(self) -> str:
        path = self.shards[0].path if self.shards else ""
        return "" if remote.is_remote(path) else os.path.realpath(path)

    def digest(self, index: int) -> int:
        shard, start, end = self._find(index)
        return hash_bytes(f"{shard.digest} {start} {end}".encode())

    def sizes(self) -> np.ndarray:
        return self.places[:, 2]

    def cache_key(self) -> bytes:
        versions = [(shard.size, shard.version) for shard in self.shards]
        return repr(versions).encode() + self.places.tobytes()

    def subset(self, indices: np.ndarray) -> Self:
        names = [self.names[index] for index in indices]
        return replace(self, names=names, places=self.places[indices])


@dataclass(frozen=True, eq=False)
class RemoteShardReader(ShardReader):
    """Images inside tar files in object storage. The bytes of each image are kept in a file in a
    folder, until there are too many."""

    folder: Path
    is_remote: ClassVar[bool] = True

    def fetch(self, indices: Iterable[int]) -> None:
        missing = [index for index in indices if not self._path(index).is_file()]
        num_bytes = sum(map(len, remote.map_parallel(self.load, missing)))
        # all processes together check the folder about each time that it has grown by a twentieth
        if secrets.randbelow(_CACHE_BYTES // 20 + 1) < num_bytes:
            self._delete_oldest()

    def load(self, index: int) -> bytes:
        path = self._path(index)
        # not fetched yet, or deleted again
        with suppress(FileNotFoundError):
            stored = path.read_bytes()
            os.utime(path)
            content = stored[:-_CHECKSUM_BYTES]
            if stored == content + _checksum(content):
                return content

        # moved to its place when complete: another process may read it meanwhile
        content = super().load(index)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        temporary.write_bytes(content + _checksum(content))
        temporary.replace(path)
        return content

    def _path(self, index: int) -> Path:
        shard, start, end = self._find(index)
        return self.folder / shard.digest / f"{start}-{end}"

    def _delete_oldest(self) -> None:
        """Delete the images that were used longest ago, if there are too many bytes for the cache
        or for the disk."""
        # another process may delete them at the same time
        with suppress(FileNotFoundError):
            files = [(path.stat(), path) for path in self.folder.glob("*/*-*")]
            total = sum(stat.st_size for stat, _ in files)
            limit = min(_CACHE_BYTES, (total + shutil.disk_usage(self.folder).free) / 2)
            for stat, path in sorted(files, key=lambda file: file[0].st_mtime_ns):
                if total <= 0.8 * limit:
                    break
                path.unlink()
                total -= stat.st_size


def find_shards(request: Request) -> SourceSplits:
    """Find the splits of shards.

    As with image folders, val without test is the test split. Labels name the classes.

    Args:
        request: Its root is a folder of shards, or a pattern. A folder holds <split>/*.tar or
            <split>-*.tar (train, val, test), or *.tar as one set. A pattern is one set, of globs
            and braces ("shards-{000..009}.tar"). Both may be addresses
            ("s3://bucket/{000..009}.tar"). Its cache holds the index and the images of object
            storage.

    Raises:
        ValueError: A shard is damaged, a label is wrong, or a class has no training images.
        FileNotFoundError: There are no shards.
        RemoteError: Object storage can't be read.
    """
    assert request.root is not None
    path = os.path.expanduser(request.root).rstrip("/")
    splits, unused = _find_splits(path)
    if not splits:
        raise FileNotFoundError(f"data.root {request.root} holds no .tar shards; check the path")

    origins = dict.fromkeys(splits, path)
    if len(splits) > 1:
        origins = {split: f"{SPLIT_NAMES[split][0]}*" for split in splits}

    # all splits are indexed together, because they have the same classes
    paths = [path for shards in splits.values() for path in shards]
    index = partial(_index_cached, request.cache_dir / "shards")
    shard_at = dict(zip(paths, remote.map_parallel(index, paths), strict=True))
    for file, samples, unused_files in shard_at.values():
        for sample in samples:
            if not sample.suffix:
                raise _ask_for_label(file, sample, unused_files)
        unused.update(unused_files)
    labels = {
        split: [sample.label for path in splits[split] for sample in shard_at[path][1]]
        for split in splits
    }
    samples = [sample for _, each, _ in shard_at.values() for sample in each]
    _check_texts(samples, path)
    column = find_label_column(labels, None, task=request.labels.task, origin=path)
    if not column.several:
        for file, each, _ in shard_at.values():
            if empty := next((sample for sample in each if not sample.label), None):
                raise _ask_for_label(file, empty, {})
    class_names, numbers, notes = number_splits(column.labels, request.classes, origin=path)
    notes += column.notes
    if not column.several and request.labels.task is None:
        notes += check_several(list(map(str, chain(*column.labels.values()))), origin=path)

    def load(split: str) -> ImageDataset:
        shards = [shard_at[path] for path in splits[split]]
        files = [file for file, _, _ in shards]
        samples = [(n, sample) for n, (_, each, _) in enumerate(shards) for sample in each]
        names = [f"{files[n].name}/{sample.key}" for n, sample in samples]
        places = np.array([(n, sample.offset, sample.size) for n, sample in samples])

        reader = ShardReader(files, names, places)
        # in object storage, images are kept when they were read
        if remote.is_remote(paths[0]):
            reader = RemoteShardReader(files, names, places, request.cache_dir / "remote")
        dataset = ImageDataset(
            name="webdataset",
            class_names=class_names,
            labels=numbers[split],
            ids=names,
            reader=reader,
            notes=tuple(notes),
        )
        return dataset.keep_classes(request.classes)

    return SourceSplits(origins, load, unused, column.guesses).with_test_split()


def open_shard(path: str) -> ShardReader:
    """Open the images of a shard, whether they have labels or not. See `find_shards`."""
    file, samples, _ = _index_cached(default_cache_dir() / "shards", path)
    places = np.array([(0, sample.offset, sample.size) for sample in samples])
    return ShardReader([file], [f"{file.name}/{sample.key}" for sample in samples], places)


def _ask_for_label(file: StoredFile, sample: _Sample, unused: Mapping[str, int]) -> ValueError:
    others = f", only {describe_counts(unused)}" if unused else ""
    key = sample.key
    text = f"{hide_tokens(file.path)} has no label {key}.cls for the image {key}{others}"
    return ValueError(f"{text}; write its class, a name or a number, into {key}.cls")


def _check_texts(samples: Sequence[_Sample], origin: str) -> None:
    """Raise ValueError if .txt files hold captions instead of labels."""
    texts = [sample.label for sample in samples if sample.suffix == "txt"]
    words = {word.strip() for text in texts for word in re.split(r"[|;,\n]", text)}
    if len(words) > max(len(texts) / 2, 2):
        raise ValueError(
            f"{origin}: the .txt files of {len(texts):,} images hold {len(words):,} different texts,"
            f" such as {shorten(texts[0], 60)!r}, no labels; write the class of each image into a"
            " <key>.cls"
        )


def _recognizes(place: str) -> bool:
    path = expand_home(place)
    return (
        remote.is_remote(place)
        or ".tar" in place
        or (path.is_dir() and bool(list_shards(str(path))))
    )


SOURCE = Source("webdataset", find_shards, recognizes=_recognizes, needs_root=True, unit="files")


def _find_splits(path: str) -> tuple[dict[str, list[str]], Counter[str]]:
    """Find the shards of each split at a path, pattern or address, and count those that belong to
    no split."""
    # object storage can't be asked whether an address is a folder
    if not os.path.isdir(path) and (not remote.is_remote(path) or ".tar" in path):
        return {"train": expand_pattern(path)}, Counter()
    splits = list_shards(path)
    used = {shard for shards in splits.values() for shard in shards}
    others = set(_glob_shards(path, "*.tar") + _glob_shards(path, "*/*.tar")) - used
    return splits, Counter(f"shard {other[len(path) :].lstrip('/')}" for other in others)


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
    top = _glob_shards(folder, f"*{suffix}")
    for split, names in SPLIT_NAMES.items():
        # other folders are not read: they may hold very many images
        for path in _glob_shards(folder, f"{names[0]}*/*{suffix}") + top:
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


def _glob_shards(folder: str, pattern: str) -> list[str]:
    prefix = folder if remote.is_remote(folder) else glob.escape(folder)
    return remote.match_files(f"{prefix}/{pattern}")


def expand_pattern(pattern: str) -> list[str]:
    """List the shards of a pattern, in its order."""
    if _count_names(pattern) > _MAX_SHARDS:
        name = shorten(hide_tokens(pattern))
        raise ValueError(
            f"data.root {name} names more than {_MAX_SHARDS:,} shards; check its braces"
        )

    shards: list[str] = []
    for name in braceexpand(pattern):
        files = remote.match_files(name)
        if not files:
            raise FileNotFoundError(f"data.root {hide_tokens(pattern)}: no file matches {name}")
        shards += files
    return shards


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(_CHECKSUM_BYTES)


def _count_names(pattern: str) -> int:
    """Count at least the names that braces make, before they are written out: 20 for
    "{0..9}-{a,b}"."""
    count = 1
    # from the inside out: a group inside another one counts as if it were next to it
    while group := re.search(r"\{([^{}]*)\}", pattern):
        numbers = re.match(r"(-?\d+)\.\.(-?\d+)", group[1])
        if numbers:
            count *= abs(int(numbers[2]) - int(numbers[1])) + 1
        elif ".." in group[1]:
            # letters, at most
            count *= 52
        else:
            count *= group[1].count(",") + 1
        pattern = pattern.replace(group[0], "", 1)
    return count


def _index_cached(
    cache_folder: Path, path: str
) -> tuple[StoredFile, list[_Sample], dict[str, int]]:
    """Find a shard, its samples and the number of its other files by suffix; keep the two for the
    next time."""
    file = remote.find_file(path)
    cached = cache_folder / f"{file.digest}.npz"
    index = open_cached(cached, lambda: json.loads(read_arrays(cached)["index"].tobytes()))
    if index is None:
        index = _index(file)
        cached.parent.mkdir(parents=True, exist_ok=True)
        # text of any length, in a file with a checksum
        write_arrays(cached, {"index": np.frombuffer(json.dumps(index).encode(), dtype=np.uint8)})
    samples, unused = index
    return file, [_Sample(*sample) for sample in samples], unused


def _index(file: StoredFile) -> tuple[list[_Sample], dict[str, int]]:
    """Read the samples of a tar file, in its order, and count its other files by suffix.

    Raises:
        ValueError: It is not a complete tar file, an image has no label, or a key has two images or
            labels.
    """
    name = hide_tokens(file.path)
    # key → offset, size
    images: dict[str, tuple[int, int]] = {}
    # suffix → key → text
    texts: dict[str, dict[str, str]] = {suffix: {} for suffix in _LABEL_SUFFIXES}
    unused: Counter[str] = Counter()
    repeated: set[str] = set()
    try:
        with file.open() as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
                if not member.isreg():
                    continue
                # tarfile notices a cut only when it reads the contents
                if not 0 <= member.size <= file.size - member.offset_data:
                    raise ValueError("it is cut short")

                # a key ends at the first dot of the file name
                folder, slash, file_name = member.name.rpartition("/")
                stem, _, suffix = file_name.partition(".")
                key = folder + slash + stem
                if is_image_name(f"x.{suffix}") and "." not in suffix:
                    repeated |= {key} & images.keys()
                    images[key] = (member.offset_data, member.size)
                elif suffix in texts:
                    repeated |= {key} & texts[suffix].keys()
                    content = tar.extractfile(member)
                    # true for a regular file
                    assert content is not None
                    text = content.read(_LABEL_BYTES).decode().strip()
                    texts[suffix][key] = _read_json(text) if suffix == "json" else text
                else:
                    unused += count_suffixes([member.name])
    except (tarfile.TarError, ValueError, ArithmeticError, EOFError) as error:
        raise ValueError(f"{name} is not a complete tar file: {error}") from error

    chosen = next((suffix for suffix in texts if any(texts[suffix].values())), "cls")
    labels = texts.pop(chosen)
    unused.update({f".{suffix}": len(other) for suffix, other in texts.items() if other})
    others = f", only {describe_counts(unused)}" if unused else ""
    if not images:
        raise ValueError(
            f"{name} holds no images <key>.jpg{others}; a sample is <key>.jpg and <key>.cls"
        )
    if repeated:
        raise ValueError(
            f"{name} has two images or labels of the key {min(repeated)}"
            "; a sample is <key>.jpg and <key>.cls"
        )
    if without_image := len(labels.keys() - images.keys()):
        unused["labels without an image"] = without_image
    samples = [
        _Sample(key, labels.get(key, ""), offset, size, chosen if key in labels else "")
        for key, (offset, size) in images.items()
    ]
    return samples, dict(unused)


def _read_json(text: str) -> str:
    """Return the label or the list of labels in a .json file as text; empty if there is none."""
    with suppress(ValueError, RecursionError):
        content = json.loads(text)
        if isinstance(content, dict):
            content = next((content[key] for key in _LABEL_KEYS if key in content), "")
        if isinstance(content, list):
            return json.dumps(content, ensure_ascii=False)
        if isinstance(content, str | int) and not isinstance(content, bool):
            return str(content).strip()
    return ""
