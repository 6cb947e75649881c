"""Batches gathered from decoded pixels in host memory or on a disk."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.augments import build_loader
from vit.data import gather as gathering
from vit.data.augment import Augmentation
from vit.data.cache import decode_dataset
from vit.data.crop import Crop
from vit.data.dataset import ImageDataset
from vit.data.gather import choose_stored, find_room
from vit.data.loader import Batch, TrainLoader, choose_pipeline
from vit.data.open import open_dataset
from vit.data.preprocess import Preprocess

PREPROCESS = Preprocess((24, 24), mean=(0.0, 0.0, 0.0), std=(1 / 255, 1 / 255, 1 / 255))
PARTS = Augmentation(crop=Crop(scale=(0.2, 1.0), flip="random"))


@pytest.fixture
def source(tmp_path: Path) -> ImageDataset:
    """Twenty-four smooth photos of several shapes."""
    across, down = np.meshgrid(np.linspace(0, 3, 90), np.linspace(0, 3, 60))
    for number in range(24):
        waves = np.stack([np.sin(across + number), np.cos(down * 1.3), np.sin(across * down)], -1)
        height, width = (60, 90) if number % 3 else (60, 50)
        pixels = np.uint8(127 + 120 * waves[:height, :width])
        place = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place)
    return open_dataset("folder", root=tmp_path / "photos").split("all")


def build_cached(source: ImageDataset, augment: Augmentation, **changes: Any) -> TrainLoader:
    preprocess = changes.pop("preprocess", PREPROCESS)
    stored_as = choose_stored(preprocess, augment.crop)
    stored = decode_dataset(
        source, size=stored_as.resize_size, preprocess=stored_as, progress=False
    )
    return build_decoding(stored, augment, preprocess=preprocess, gathers=True, **changes)


def build_decoding(dataset: ImageDataset, augment: Augmentation, **changes: Any) -> TrainLoader:
    options = {"batch_size": 8, "seed": 3, "device": "cpu", "preprocess": PREPROCESS, "workers": 0}
    return build_loader(dataset, augment=augment, **options | changes)


def read(loader: TrainLoader, epoch: int = 1, **options: Any) -> list[Batch]:
    return list(loader.epoch(epoch, **options))


def assert_equal(batches: list[Batch], expected: list[Batch]) -> None:
    assert len(batches) == len(expected) > 0
    for pair in zip(batches, expected, strict=True):
        assert all(torch.equal(*fields) for fields in zip(*pair, strict=True))


def test_random_parts_are_those_that_workers_cut(source: ImageDataset) -> None:
    """From fewer pixels: of smooth photos they differ by a grey level or two."""
    assert choose_stored(PREPROCESS, PARTS.crop).image_size == (34, 34)
    cached = read(build_cached(source, PARTS))
    decoded = read(build_decoding(source, PARTS))
    for batch, expected in zip(cached, decoded, strict=True):
        assert torch.equal(batch.sample_ids, expected.sample_ids)
        difference = (batch.images - expected.images).abs()
        assert float(difference.mean()) < 1.5
        # another part would differ by more
        assert float((batch.images.flip(3) - expected.images).abs().mean()) > 15


def test_stretched_images_are_cropped_as_they_are_shown(source: ImageDataset) -> None:
    preprocess = replace(PREPROCESS, resize_mode="stretch")
    cached = read(build_cached(source, PARTS, preprocess=preprocess))
    decoded = read(build_decoding(source, PARTS, preprocess=preprocess))
    for batch, expected in zip(cached, decoded, strict=True):
        assert float((batch.images - expected.images).abs().mean()) < 5


def test_other_crops_are_those_of_the_resident_pixels(source: ImageDataset) -> None:
    augment = Augmentation(crop=Crop(padding=2, flip="random"), color_jitter=0.2)
    preprocess = replace(PREPROCESS, crop_pct=0.8)
    resident = decode_dataset(
        source, size=preprocess.resize_size, preprocess=preprocess, progress=False
    )
    assert_equal(
        read(build_cached(source, augment, preprocess=preprocess)),
        read(build_decoding(resident, augment, preprocess=preprocess)),
    )


def test_threads_processes_and_the_first_step_change_no_batch(source: ImageDataset) -> None:
    expected = read(build_cached(source, PARTS))
    assert_equal(read(build_cached(source, PARTS, workers=5)), expected)
    assert_equal(read(build_cached(source, PARTS), start_step=1), expected[1:])
    ranks = [read(build_cached(source, PARTS, rank=rank, world_size=2)) for rank in range(2)]
    joined = [Batch(*map(torch.cat, zip(*pair, strict=True))) for pair in zip(*ranks, strict=True)]
    assert_equal(joined, expected)
    # an epoch that is abandoned ends its threads
    batches = build_cached(source, PARTS, workers=2).epoch(0)
    next(batches)
    batches.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("memory", "disk", "is_built", "is_ssd", "room"),
    [
        (3000, 2000, False, False, "they fit in the free memory"),
        (2000, 2000, False, True, "they are read from an SSD"),
        (2000, 2000, False, False, None),
        (3000, 1200, False, True, None),
        (3000, 1200, True, False, "they fit in the free memory"),
    ],
)
def test_room_is_in_memory_or_on_a_fast_disk(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    memory: int,
    disk: int,
    is_built: bool,
    is_ssd: bool,
    room: str | None,
) -> None:
    usage = type("Usage", (), {"free": disk})
    monkeypatch.setattr(gathering, "count_free_memory", lambda: memory)
    monkeypatch.setattr(gathering, "has_fast_disk", lambda folder: is_ssd)
    monkeypatch.setattr(gathering.shutil, "disk_usage", lambda folder: usage)
    assert find_room(1000, tmp_path / "not" / "there", is_built=is_built) == room


def test_pixels_that_a_gpu_does_not_hold_are_cached_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vit.data.loader.count_free_bytes", lambda device: 1000)
    rooms: list[Callable[[], str | None]] = [lambda: "on a disk", lambda: None]
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    chosen = [choose_pipeline(500, device=gpu, find_room=room) for room in rooms]
    assert [name for name, _ in chosen] == ["cached", "workers"]
    assert chosen[0][1].startswith("on a disk; 0 MiB of pixels do not fit in 40% of the")
    assert choose_pipeline(400, device=gpu, find_room=rooms[0])[0] == "resident"
    assert choose_pipeline(2**60, device=cpu, find_room=rooms[0])[0] == "workers"
