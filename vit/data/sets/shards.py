"""WebDataset tar shards: `<key>.<image suffix>` and `<key>.cls` side by side in tar files.

A shard is indexed once, and an image is then read by its offset: samples are reached at random, as with files. Of a
shard in object storage only the headers are read for it, and the index is kept in the cache. A `pipe:` shard has no
offsets: it is copied to the cache first, which needs that much disk.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import IO, TypeVar, cast

import numpy as np
from PIL import Image

from vit.data.images import check_header, open_image
from vit.data.sets import remote
from vit.data.sets.folders import IMAGE_SUFFIXES
from vit.data.sets.remote import RemoteFile, RemoteReader
from vit.data.sets.source import FindOptions, FoundSplit, FoundSplits, ImageSource, StoredReader
from vit.runtime.arguments import shorten
from vit.runtime.documents import read_json
from vit.runtime.files import open_regular, read_text, rename_durably, write_text

_MOST_CLASSES, _LABEL_BYTES = 1_000_000, 2**16  # that are numbered; of a label
_MOST_SHARDS = 1_000_000
_MANY_BYTES = 2**27  # of shards, above which starting processes costs less than it saves
_HEADER_BYTES = 2**16  # of an image, in which its size nearly always is
_SPLIT_PREFIXES = {"train": "train", "validation": "val", "test": "test"}
Shard = Path | RemoteFile
AnyShard = TypeVar("AnyShard", Path, RemoteFile)
_Sample = tuple[str, str, int, int]
_Index = Mapping[Shard, list[_Sample]]


@dataclass(frozen=True, eq=False)
class ShardReader(StoredReader):
    """Images inside tar files."""

    shards: Sequence[Path]
    names: Sequence[str]
    places: np.ndarray  # int64 [n, 3]: shard, offset, size in bytes

    def open(self, index: int) -> AbstractContextManager[Image.Image]:
        shard, offset, size = self.places[index].tolist()
        with open_regular(self.shards[shard]) as file:
            file.seek(offset)
            return open_image(io.BytesIO(file.read(size)), name=self.names[index])

    def check(self, index: int) -> None:
        shard, offset, size = self.places[index].tolist()
        with open_regular(self.shards[shard]) as file:
            for count in (min(size, _HEADER_BYTES), size):
                try:
                    file.seek(offset)
                    check_header(io.BytesIO(file.read(count)), name=self.names[index])
                    return
                except ValueError:
                    if count == size:
                        raise

    def sizes(self) -> np.ndarray:
        return self.places[:, 2]

    def cache_key(self) -> bytes:
        stats = map(os.stat, self.shards)
        return repr([(stat.st_size, stat.st_mtime_ns) for stat in stats]).encode() + self.places.tobytes()

    def subset(self, indices: np.ndarray) -> ShardReader:
        places = self.places[indices]
        used, places[:, 0] = np.unique(places[:, 0], return_inverse=True)
        return ShardReader([self.shards[shard] for shard in used], [self.names[index] for index in indices], places)


def find_shards(options: FindOptions) -> FoundSplits:
    """The splits of `root`: a folder of shards, or a pattern.

    A folder holds <split>/*.tar or <split>*.tar (train, val, test), or *.tar as one set. A pattern is one set: globs,
    braces ("shards-{000..009}.tar") and commands ("pipe:cat shards.tar"), joined by "::". Patterns may be addresses
    ("s3://bucket/{000..009}.tar"). As with image folders, val without test is the test split. Class names are the lines
    of classes.txt beside the first shard, else the labels.
    """
    if options.root is None:
        raise ValueError("data.name=webdataset needs data.root: a folder of .tar shards, a pattern or pipe:command")
    root, folder = str(options.root), Path(options.root).expanduser()
    found: Mapping[str, Sequence[Shard]]
    if is_folder := folder.is_dir():
        found = list_shards(folder.glob)
    elif is_folder := remote.is_remote(root) and ".tar" not in root:
        found = list_shards(lambda pattern: remote.find_files(f"{root.rstrip('/')}/{pattern}"))
    else:
        found = {"train": _expand(root, options.cache_dir / "shards")}
    if not any(found.values()):
        raise FileNotFoundError(f"data.root {root} holds no .tar shards")
    origins, splits = {"train": root}, {split: [*shards] for split, shards in found.items()}
    if is_folder:
        places = {split: Path(str(shards[0])).parent for split, shards in splits.items()}
        patterns = {split: f"{_SPLIT_PREFIXES[split]}*.tar" for split in splits if places[split] == folder}
        origins = {split: f"{place.name}/" for split, place in places.items()} | (patterns if len(splits) > 1 else {})
    if "validation" in splits and "test" not in splits:
        splits["test"], origins["test"] = splits.pop("validation"), origins["validation"]
    load = partial(_load, splits, cache(partial(_index_all, splits, options.cache_dir)), options)
    return {split: FoundSplit(origins[split], partial(load, split)) for split in splits}


def list_shards(glob: Callable[[str], Iterable[AnyShard]], suffix: str = ".tar") -> dict[str, list[AnyShard]]:
    """The shards of each split in a folder, of which `glob` lists patterns; {} where there are none."""
    found = {
        split: sorted(glob(f"{prefix}*/*{suffix}")) or sorted(glob(f"{prefix}*{suffix}"))
        for split, prefix in _SPLIT_PREFIXES.items()
    }
    found = found if any(found.values()) else {"train": sorted(glob(f"*{suffix}"))}
    return {split: shards for split, shards in found.items() if shards}


def _expand(pattern: str, spool_folder: Path) -> list[Shard]:
    from webdataset.shardlists import expand_urls

    if (count := _count_urls(pattern)) > _MOST_SHARDS:
        raise ValueError(
            f"data.root {shorten(pattern)} stands for {shorten(str(count))} shards, more than {_MOST_SHARDS:,}"
        )
    urls, shards = expand_urls(pattern), list[Shard]()
    if any(map(remote.is_remote, urls)) and not all(map(remote.is_remote, urls)):
        raise ValueError(f"data.root {shorten(pattern)} is in part an address, in part none; name shards of one kind")
    if remote.is_remote(urls[0]):
        return [shard for found in remote.at_once(remote.find_files, urls) for shard in found]
    for url in urls:
        if url.startswith("pipe:") and "pipe:" not in pattern:  # who wrote the pattern was asked about a literal one
            raise ValueError(f"data.root {shorten(pattern)}: a command can't be put together; write pipe: out")
        found = [_spool(url, spool_folder)] if url.startswith("pipe:") else [*map(Path, sorted(glob.glob(url)))]
        if not found:
            raise FileNotFoundError(f"data.root {pattern}: no file matches {url}")
        shards += found
    return shards


def _count_urls(pattern: str) -> int:
    """No fewer than its braces stand for, counted before they are written out: of "{0..9}-{a,b}" 20."""
    count = 1
    while group := re.search(r"\{([^{}]*)\}", pattern):
        ends = re.match(r"(-?\d+)\.\.(-?\d+)|\w\.\.\w", group[1])
        letters = 64 if ends else group[1].count(",") + 1
        count *= abs(int(ends[2]) - int(ends[1])) + 1 if ends and ends[1] else letters
        pattern = pattern.replace(group[0], "", 1)
    return count


def _spool(url: str, folder: Path) -> Path:
    """The output of a `pipe:` command as a file in `folder`."""
    from webdataset import gopen

    shard = folder / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.tar"
    if shard.is_file():
        return shard
    folder.mkdir(parents=True, exist_ok=True)
    partial_copy = shard.with_suffix(f".{os.getpid()}.partial")
    try:
        with gopen(url) as stream, partial_copy.open("wb") as file:
            shutil.copyfileobj(stream, file)
        _index(partial_copy)  # a command that broke off leaves no whole tar
        rename_durably(partial_copy, shard)
    except (OSError, ValueError) as error:
        raise OSError(f"{url} gave no shard: {error}") from error
    finally:
        partial_copy.unlink(missing_ok=True)
    return shard


def _load(
    splits: Mapping[str, list[Shard]], index: Callable[[], _Index], options: FindOptions, split: str
) -> ImageSource:
    texts = {text for samples in index().values() for _, text, _, _ in samples}
    class_names, numbers = _number_classes(texts, next(iter(index())))
    shards = splits[split]
    samples = [(number, shard, *sample) for number, shard in enumerate(shards) for sample in index()[shard]]
    names = [f"{shard.name}/{key}" for _, shard, key, *_ in samples]
    labels = np.array([numbers[text] for _, _, _, text, *_ in samples])
    places = np.array([(number, *place) for number, _, _, _, *place in samples], dtype=np.int64)
    reader: StoredReader
    if addresses := [shard for shard in shards if isinstance(shard, RemoteFile)]:
        most = options.remote_cache_gb * 1e9
        reader = RemoteReader(options.cache_dir / "remote", most, addresses, names, places)
    else:
        reader = ShardReader([shard for shard in shards if isinstance(shard, Path)], names, places)
    source = ImageSource(name="webdataset", class_names=class_names, labels=labels, ids=names, reader=reader)
    return source.keep_classes(options.classes)


def _index_all(splits: Mapping[str, list[Shard]], cache_dir: Path) -> _Index:
    """Of all splits together, whose classes are the same; where it takes seconds, a process a core."""
    shards = [shard for shards in splits.values() for shard in shards]
    if isinstance(shards[0], RemoteFile):
        samples = remote.at_once(partial(_index_remote, cache_dir / "remote"), shards)
    elif sum(os.path.getsize(str(shard)) for shard in shards) < _MANY_BYTES:
        samples = [_index(shard) for shard in shards]
    else:
        from joblib import Parallel, delayed  # type: ignore[import-untyped]

        samples = Parallel(n_jobs=len(os.sched_getaffinity(0)))(delayed(_index)(shard) for shard in shards)
    return dict(zip(shards, samples, strict=True))


def _index_remote(folder: Path, shard: RemoteFile) -> list[_Sample]:
    """`_index`, kept for the next time."""
    path = folder / shard.digest / "index.json"
    try:
        return [(str(key), str(text), int(start), int(size)) for key, text, start, size in read_json(path)]
    except (OSError, ValueError, TypeError):
        samples = _index(shard)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(samples))
        return samples


def _index(shard: Shard) -> list[_Sample]:
    """(key, text of .cls, offset of the image, its bytes) of each sample of a tar file, in its order."""
    images: dict[str, tuple[int, int]] = {}
    texts: dict[str, str] = {}
    opened, whole = (
        (open_regular(shard), shard.stat().st_size) if isinstance(shard, Path) else (shard.open(), shard.size)
    )
    try:
        with opened as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if not member.isreg():
                    continue
                if not 0 <= member.size <= whole - member.offset_data:
                    raise ValueError("it is cut short")
                folder, _, file_name = member.name.rpartition("/")
                stem, _, suffix = file_name.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                if f".{suffix.lower()}" in IMAGE_SUFFIXES:
                    images[key] = (member.offset_data, member.size)
                elif suffix == "cls":
                    texts[key] = cast(IO[bytes], tar.extractfile(member)).read(_LABEL_BYTES).decode().strip()
    except (tarfile.TarError, ValueError, ArithmeticError, EOFError) as error:
        raise ValueError(f"{shard} is no whole tar file: {error}") from error
    if not images:
        raise ValueError(f"{shard} holds no images; a sample is <key>.jpg and <key>.cls")
    if unlabelled := [key for key in images if not texts.get(key)]:
        raise ValueError(f"{shard} has no label {unlabelled[0]}.cls for the image {unlabelled[0]}")
    return [(key, texts[key], *place) for key, place in images.items()]


def _number_classes(texts: set[str], first: Shard) -> tuple[tuple[str, ...], dict[str, int]]:
    """Class names, and label text → label. Numbers count the lines of classes.txt beside the first shard, if any."""
    folder = str(first.parent) if isinstance(first, Path) else first.url.rpartition("/")[0]
    if all(text.isdecimal() for text in texts):
        if too_long := [text for text in texts if len(text.lstrip("0")) > len(str(_MOST_CLASSES)) - 1]:
            raise ValueError(f"a shard has the label {shorten(too_long[0])}; numbers go up to {_MOST_CLASSES - 1:,}")
        numbers = {text: int(text) for text in texts}
        listed, names = f"{folder}/classes.txt", [str(number) for number in range(max(numbers.values()) + 1)]
        if remote.is_remote(listed):
            text = remote.read_text(listed)
        else:
            text = read_text(Path(listed)) if Path(listed).is_file() else None
        if text is not None:
            names = [line.strip() for line in text.splitlines() if line.strip()]
        if max(numbers.values()) >= len(names):
            raise ValueError(f"{listed} names {len(names)} classes, but a label is {max(numbers.values())}")
    else:
        names = sorted(texts)
        numbers = {name: number for number, name in enumerate(names)}
    if len(names) < 2:
        raise ValueError(f"{folder} holds one class, {names[0]!r}; a classifier needs at least two")
    return tuple(names), numbers
