"""Images that don't fit memory: training begins when they are listed, and what can't be read is
named and replaced."""

import pickle
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.augments import build_loader
from vit.data.augment import Augmentation
from vit.data.cache import decode_dataset
from vit.data.crop import Crop
from vit.data.dataset import ImageDataset
from vit.data.loader import Batch, TrainLoader
from vit.data.open import open_dataset
from vit.data.preprocess import Preprocess
from vit.data.random import StatelessRandom

MakeFolder = Callable[..., Path]
UNREADABLE = {"cat/03.png", "dog/05.png"}


@pytest.fixture
def dataset(make_folder: MakeFolder) -> ImageDataset:
    """Forty 24×32 files, of which one is cut off behind its header and one is a text."""
    root = make_folder(
        *[f"{name}/{number:02d}.png" for name in ("cat", "dog") for number in range(20)]
    )
    (root / "cat/03.png").write_bytes((root / "cat/03.png").read_bytes()[:200])
    (root / "dog/05.png").write_text("no image")
    return open_dataset("folder", root=root).split("all")


def make_loader(dataset: ImageDataset, **changes: Any) -> TrainLoader:
    options: dict[str, Any] = {
        "batch_size": 8,
        "seed": 3,
        "device": "cpu",
        "workers": 0,
        "max_unreadable_fraction": 0.1,
    }
    augment = Augmentation(crop=Crop(scale=(0.3, 1.0), flip="random"), color_jitter=0.2)
    return build_loader(
        dataset, preprocess=Preprocess((12, 10)), augment=augment, **options | changes
    )


def read_epoch(loader: TrainLoader, epoch: int, **options: Any) -> list[Batch]:
    return list(loader.epoch(epoch, on_warning=lambda text: None, **options))


def assert_same(one: list[Batch], other: list[Batch]) -> None:
    assert len(one) == len(other) > 0
    assert all(
        torch.equal(*fields)
        for pair in zip(one, other, strict=True)
        for fields in zip(*pair, strict=True)
    )


def test_an_unreadable_image_is_named_once_and_replaced(dataset: ImageDataset) -> None:
    loader = make_loader(dataset)
    messages: list[str] = []
    batches = [
        batch for epoch in (0, 1) for batch in loader.epoch(epoch, on_warning=messages.append)
    ]
    assert sorted(text.partition(": ")[0] for text in messages) == [
        f"skipped all image {name}" for name in sorted(UNREADABLE)
    ]
    shown = torch.cat([batch.sample_ids for batch in batches])
    assert len(shown) == 80
    assert not {dataset.ids[index] for index in shown.tolist()} & UNREADABLE
    for batch in batches:  # the label is that of the image in place of the unreadable one
        assert torch.equal(batch.labels, torch.from_numpy(dataset.labels)[batch.sample_ids])


def test_without_an_observer_it_is_a_warning_of_python(dataset: ImageDataset) -> None:
    with pytest.warns(UserWarning, match=r"skipped all image (cat/03|dog/05)\.png: "):
        list(make_loader(dataset).epoch(0))


def test_what_is_known_of_the_files_changes_no_batch(
    dataset: ImageDataset, set_start_method: Callable[[str], None]
) -> None:
    """Nor does the number of workers or processes, nor where an epoch goes on."""
    loader = make_loader(dataset)
    epochs = [read_epoch(loader, epoch) for epoch in (0, 1)]
    assert_same(epochs[0], read_epoch(loader, 0))  # now it knows which can't be read
    assert_same(epochs[1][2:], read_epoch(make_loader(dataset), 1, start_step=2))
    for workers, method in ((1, "fork"), (2, "fork"), (1, "spawn")):
        set_start_method(method)
        loader = make_loader(dataset, workers=workers)
        for epoch in (0, 1):
            assert_same(epochs[epoch], read_epoch(loader, epoch))
        loader.close()
    set_start_method("fork")
    ranks = [read_epoch(make_loader(dataset, rank=rank, world_size=2), 0) for rank in (0, 1)]
    together = [
        Batch(*map(torch.cat, zip(*pair, strict=True))) for pair in zip(*ranks, strict=True)
    ]
    assert_same(epochs[0], together)


def test_too_many_damaged_files_are_refused_when_they_are_met(dataset: ImageDataset) -> None:
    with pytest.raises(
        ValueError, match=r"2 of 40 images can't be read, more than the allowed fraction of 0\.04"
    ):
        read_epoch(make_loader(dataset, max_unreadable_fraction=0.04), 0)


def test_without_readable_images_an_epoch_ends_with_a_sentence(dataset: ImageDataset) -> None:
    root = Path(dataset.reader.root)  # type: ignore[attr-defined]
    for name in dataset.ids:
        (root / name).write_text("no image")
    with pytest.raises(ValueError, match=r"images can't be read|too few images"):
        read_epoch(make_loader(dataset, max_unreadable_fraction=1.0), 0)


def test_a_worker_is_sent_no_more_of_many_images(make_folder: MakeFolder) -> None:
    """The paths of all images stay in the main process."""
    root = make_folder(
        *[f"{name}/{number:02d}.png" for name in ("cat", "dog") for number in range(20)]
    )
    few = open_dataset("folder", root=root).split("all")
    many = few.subset(np.arange(20_000) % 40)
    sizes = []
    for dataset in (few, many):
        loader = make_loader(dataset)
        task = loader._workers.build_indices(StatelessRandom(0, 0, torch.arange(8)))
        sent = loader._workers.decoder.__dict__ | {
            "transform": None
        }  # holds random generators, which differ in size as pickles
        sizes.append(len(pickle.dumps((sent, task))))
    assert abs(sizes[0] - sizes[1]) < 100  # a name that stands there once or twice


def test_images_are_known_by_names_sizes_and_labels(dataset: ImageDataset, tmp_path: Path) -> None:
    root = Path(dataset.reader.root)  # type: ignore[attr-defined]
    shutil.copytree(root, tmp_path / "moved")  # the times are others
    moved = open_dataset("folder", root=tmp_path / "moved").split("all")
    assert moved.fingerprint == dataset.fingerprint
    with (tmp_path / "moved" / "cat/04.png").open("ab") as file:
        file.write(b"\0")
    assert moved.fingerprint != dataset.fingerprint
    assert replace(dataset, labels=1 - dataset.labels).fingerprint != dataset.fingerprint
    assert dataset.subset(np.arange(39)).fingerprint != dataset.fingerprint


def test_decoding_changes_the_fingerprint_to_that_of_the_pixels(
    dataset: ImageDataset, tmp_path: Path
) -> None:
    decoded = decode_dataset(dataset, size=None, cache_dir=tmp_path / "cache", progress=False)
    assert {name for name, _ in decoded.unreadable} == UNREADABLE
    assert decoded.fingerprint != dataset.fingerprint
    with warnings.catch_warnings(action="error"):  # what can't be read was left out
        list(make_loader(decoded).epoch(0))
