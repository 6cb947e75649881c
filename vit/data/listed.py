"""Images that training decodes as it goes: listed at the start, hashed where they are decoded for the first time.

Such a run is known by the names, sizes and labels of its images. Their pixels, and which of them can't be read, are
known when its first epoch ends. A sample that can't be read is replaced by another one, which is a function of (seed,
epoch, sample) and of the files alone.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from vit.data.cache import check_headers, decode_chunk, open_scan, save_scan, work_through
from vit.data.dataset import DecodedDataset, check_unreadable
from vit.data.duplicates import jpeg_note
from vit.data.random import SampleIds, StatelessRandom
from vit.data.sets.source import ImageSource, StoredReader
from vit.runtime.processes import Process

_UNKNOWN, _READ, _UNREADABLE = 0, 1, 2
_MOST_HEADERS = 20_000  # of more images so many are looked at before the first step, evenly spaced: two seconds
_SAMPLE = 200  # images in which traces of JPEG are looked for
_MOST_DRAWS = 1000


@dataclass(frozen=True, eq=False, kw_only=True)
class ListedDataset(DecodedDataset):
    """Every image of a source. What is not known yet of one's pixels is 0; `unreadable` grows."""

    unreadable: list[tuple[str, str]]
    state: np.ndarray  # uint8 [n]: unknown, read or unreadable
    max_unreadable_fraction: float
    cache_dir: Path | None
    workers: int | None  # processes; None: one a core
    news: list[str] = field(default_factory=list)  # a sentence for each image that turned out to be unreadable
    reasons: dict[int, str] = field(default_factory=dict)  # of those that are
    scan: list[DecodedDataset] = field(default_factory=list)  # when all is known: what it amounts to

    @classmethod
    def open(cls, source: ImageSource, **options: Any) -> Self:
        """Without reading them, but with what an earlier run or scan found; options are the fields from
        `max_unreadable_fraction` to `workers`."""
        count, scan = len(source), open_scan(source, options["cache_dir"])
        note = jpeg_note(source.class_names, source.sample(_SAMPLE))
        origin: dict[str, Any] = {"name": source.name, "split": source.split, "class_names": source.class_names}
        listed: dict[str, Any] = {"labels": source.labels, "ids": tuple(source.ids), "source": source, "images": None}
        empty = {name: np.zeros(count, dtype=np.uint64) for name in ("digests", "perceptual")}
        listed |= {"notes": source.notes if note is None else (*source.notes, note), "unreadable": [], **empty}
        dataset = cls(**origin, **listed, state=np.zeros(count, dtype=np.uint8), **options)
        if scan is not None:
            reasons = dict(scan.unreadable)
            bad = np.array([name in reasons for name in source.ids])
            unreadable = {index: reasons[source.ids[index]] for index in np.flatnonzero(bad).tolist()}
            dataset.record(np.flatnonzero(~bad), np.stack([scan.digests, scan.perceptual]), unreadable)
            dataset.scan.append(scan)
        return dataset

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over class names, split and the images' names, labels and sizes in bytes, in their order."""
        assert isinstance(self.source.reader, StoredReader)
        text = json.dumps(["listed", self.split, *self.class_names, *self.ids])
        numbers = np.stack([self.labels, self.source.reader.sizes()]).astype("<i8")
        return hashlib.sha256(text.encode() + numbers.tobytes()).hexdigest()

    @property
    def is_complete(self) -> bool:
        return bool(self.state.all())

    def completed(self) -> DecodedDataset:
        return self.scan[0] if self.scan else self

    def record(self, indices: np.ndarray, hashes: np.ndarray, unreadable: Mapping[int, str]) -> None:
        super().record(indices, hashes, {i: reason for i, reason in unreadable.items() if self.state[i] == _READ})
        for index, reason in unreadable.items():
            if self.state[index] == _UNKNOWN:
                self.state[index], self.reasons[index] = _UNREADABLE, reason
                self.unreadable.append((self.ids[index], reason))
                self.news.append(f"skipped {self.split} image {self.ids[index]}: {reason}")
        if unreadable:
            check_unreadable(self.unreadable, len(self), self.max_unreadable_fraction)
        read = hashes[0] != 0  # which of 2⁶⁴ images one is by chance
        self.digests[indices[read]], self.perceptual[indices[read]] = hashes[:, read]
        self.state[indices[read]] = _READ

    def replace_unreadable(self, ids: SampleIds, rng: StatelessRandom) -> SampleIds:
        # of any image, and of a number that the epoch has no other of, hence with an augmentation of its own
        count = len(self)
        for _ in range(_MOST_DRAWS):
            wrong = torch.from_numpy(self.state[(ids % count).numpy()] == _UNREADABLE)
            if not wrong.any():
                return ids
            drawn = (rng.bits("replacement", ids) & (2**62 - 1)) % (count << 20)
            ids = torch.where(wrong, count + drawn, ids)
        raise ValueError(f"too few images of {self.name} {self.split} can be read; the first: {self.unreadable[:1]}")

    def check_headers(self, process: Process) -> None:
        """Look for files that are no images, without decoding any; each process for a part of them."""
        self._share(process)  # the cache of another machine may hold more
        count = len(self)
        if not self.is_complete and self.source.reader.remote_shards is None:
            looked_at = np.linspace(0, count - 1, min(count, _MOST_HEADERS)).round().astype(np.int64)
            self._work_through(looked_at, check_headers, "checking", process)
        elif self.is_complete and not self.scan:
            self._save_scan()
        self.news.clear()  # the summary of the run has them

    def finish_epoch(self, process: Process) -> None:
        if not self.scan:
            self._share(process)
            self._work_through(np.flatnonzero(self.state == _UNKNOWN), decode_chunk, "hashing", process)
            self._save_scan()

    def collect(self, process: Process) -> dict[str, Any]:
        if not self.scan:
            self._share(process)
        return self._get_known()

    def restore(self, found: Mapping[str, Any]) -> None:
        if found:  # earlier versions have nothing
            self._add(found)
            self.news.clear()  # the summary of the run has them

    def take_news(self) -> list[str]:
        news = [*self.news]
        self.news.clear()
        return news

    def _get_known(self) -> dict[str, Any]:
        read = np.flatnonzero(self.state == _READ)
        hashes = np.stack([self.digests[read], self.perceptual[read]]).view(np.int64)
        return {"read": torch.from_numpy(read), "hashes": torch.from_numpy(hashes), "unreadable": dict(self.reasons)}

    def _add(self, found: Mapping[str, Any]) -> None:
        self.record(found["read"].numpy(), found["hashes"].numpy().view(np.uint64), found["unreadable"])

    def _share(self, process: Process) -> None:
        """Tell every process what the others have found."""
        for found in process.exchange(self._get_known()) if process.world_size > 1 else ():
            self._add(found)

    def _save_scan(self) -> None:
        hashes = np.stack([self.digests, self.perceptual])
        self.scan.append(save_scan(self.source, self.cache_dir, hashes, self.reasons))

    def _work_through(self, indices: np.ndarray, work: Any, title: str, process: Process) -> None:
        own = indices[process.rank :: process.world_size]
        options: dict[str, Any] = {"title": title, "workers": self.workers, "progress": process.is_main}
        for start, hashes, failures in work_through(self.source.subset(own), work, **options):
            unreadable = {int(own[place]): reason for place, reason in failures.items()}
            self.record(own[start : start + hashes.shape[1]], hashes, unreadable)
        self._share(process)
