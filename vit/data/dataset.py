"""Labelled images of one split, all of them decoded or scanned; a subclass learns of its images as they are decoded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vit.data.sets.source import ImageSource

if TYPE_CHECKING:
    from vit.data.random import SampleIds, StatelessRandom
    from vit.runtime.processes import Process


@dataclass(frozen=True, eq=False)
class DecodedDataset:
    """Decoded images with their labels; what could not be decoded is only in `unreadable`, (id, reason)."""

    name: str
    split: str
    class_names: tuple[str, ...]
    labels: np.ndarray  # int64 [n]
    ids: tuple[str, ...]
    images: np.ndarray | None  # uint8 [n, H, W, 3], mapped from disk; None after a scan
    digests: np.ndarray  # uint64 [n], of size and pixels of the original
    perceptual: np.ndarray  # uint64 [n], difference hash
    unreadable: Sequence[tuple[str, str]]
    notes: tuple[str, ...]
    source: ImageSource  # the same images in full size: those of the source that are readable

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def fingerprint(self) -> str:
        """sha256 over class names, split and the images' labels and pixels; not file names, nor their order.

        JPEG files decode to the same pixels with the same decoder only: libjpeg versions may differ in a bit.
        """
        pairs = np.stack([self.labels.astype(np.uint64), self.digests], axis=1)
        ordered = pairs[np.lexsort(pairs.T)].astype("<u8").tobytes()
        return hashlib.sha256(json.dumps([self.split, *self.class_names]).encode() + ordered).hexdigest()

    @property
    def is_complete(self) -> bool:
        """Whether the hashes of all images are known."""
        return True

    def completed(self) -> DecodedDataset:
        """The readable images with their hashes and the fingerprint of their pixels, when all is known; these until
        then."""
        return self

    def record(self, indices: np.ndarray, hashes: np.ndarray, unreadable: Mapping[int, str]) -> None:
        """Note the hashes of images, uint64 [2, m], where they are not 0, and why others can't be read. Raises
        ValueError for one that could be before, and where they are too many."""
        for index, reason in unreadable.items():
            raise ValueError(f"{self.ids[index]} was readable before, but no longer: {reason}")

    def replace_unreadable(self, ids: SampleIds, rng: StatelessRandom) -> SampleIds:
        """The ids, with another drawn for each whose image is known to be unreadable."""
        return ids

    def finish_epoch(self, process: Process) -> None:
        """Find out what is not known when an epoch has ended; all processes take part, as in `collect`."""

    def collect(self, process: Process) -> dict[str, Any]:
        """What the processes know that a scan finds, for a checkpoint."""
        return {}

    def restore(self, found: Mapping[str, Any]) -> None:
        """Add what `collect` gave."""

    def take_news(self) -> list[str]:
        """A sentence for each image that turned out to be unreadable since the last call."""
        return []


def check_unreadable(unreadable: Sequence[tuple[str, str]], count: int, most: float) -> None:
    """Raise ValueError where more than a fraction of `count` images can't be read, or none can."""
    if (bad := len(unreadable)) > most * count or bad == count:
        what = f"{bad} of {count} images can't be read, more than the allowed fraction of {most}"
        raise ValueError(f"{what}; the first is {': '.join(unreadable[0])}")
