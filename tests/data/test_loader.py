"""Order and random numbers are functions of (seed, epoch, sample): of nothing else, and never the
same twice."""

import gc
import multiprocessing
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.augments import build_loader
from vit.data.augment import Augmentation, Mixing
from vit.data.cache import decode_dataset
from vit.data.crop import Crop
from vit.data.dataset import ImageDataset
from vit.data.loader import Batch, TrainLoader, choose_pipeline
from vit.data.open import open_dataset
from vit.data.preprocess import Preprocess
from vit.data.random import StatelessRandom
from vit.data.sources.base import FileReader
from vit.data.workers import BatchIndices, DecodingWorkers

MakeFolder = Callable[..., Path]
PREPROCESS = Preprocess((12, 10))
FULL = Augmentation(
    crop=Crop(padding=2, flip="random"),
    cutout=4,
    color_jitter=0.2,
    mixing=Mixing(mixup=0.8, cutmix=1.0),
)
GEOMETRY = Augmentation(crop=Crop(scale=(0.3, 1.0), flip="random"), color_jitter=0.2)


@pytest.fixture
def dataset(array_source: ImageDataset, tmp_path: Path) -> ImageDataset:
    return decode_dataset(array_source, size=(12, 10), cache_dir=tmp_path / "cache", progress=False)


@pytest.fixture
def file_dataset(make_folder: MakeFolder, tmp_path: Path) -> ImageDataset:
    """Twenty-four 24×32 files, scanned."""
    root = make_folder(
        *[f"{name}/{number:02d}.png" for name in ("cat", "dog") for number in range(12)]
    )
    source = open_dataset("folder", root=root).split("all")
    return decode_dataset(source, size=None, cache_dir=tmp_path / "cache", progress=False)


def make(dataset: ImageDataset, **changes: Any) -> TrainLoader:
    options: dict[str, Any] = {
        "batch_size": 8,
        "seed": 3,
        "device": "cpu",
        "preprocess": PREPROCESS,
        "augment": Augmentation(),
    }
    return build_loader(dataset, **options | changes)


def assert_same(left: Iterator[Batch], right: Iterator[Batch]) -> None:
    pairs = list(zip(left, right, strict=True))
    assert pairs
    for one, other in pairs:
        for field, another in zip(one, other, strict=True):
            assert torch.equal(field, another)


# --- order and ranks --------------------------


def test_an_epoch_shows_every_sample_once_with_its_own_label(dataset: ImageDataset) -> None:
    loader = make(dataset, batch_size=12)
    batches = list(loader.epoch(0))
    assert [len(batch.labels) for batch in batches] == [12] * 5
    assert len(loader) == 5
    ids = torch.cat([batch.sample_ids for batch in batches])
    assert sorted(ids.tolist()) == list(range(60))
    for batch in batches:
        assert torch.equal(batch.labels, torch.from_numpy(dataset.labels)[batch.sample_ids])
        assert torch.equal(batch.targets, batch.labels)
        expected = PREPROCESS.normalize(torch.from_numpy(dataset.pixels[batch.sample_ids.numpy()]))
        torch.testing.assert_close(batch.images, expected)


def test_what_does_not_fill_a_batch_is_left_out(dataset: ImageDataset) -> None:
    loader = make(dataset)
    assert [len(batch.labels) for batch in loader.epoch(4)] == [8] * len(loader) == [8] * 7


def test_the_same_seed_repeats_a_run_and_another_does_not(dataset: ImageDataset) -> None:
    loader, again = (make(dataset, augment=FULL) for _ in range(2))
    assert_same(loader.epoch(2), again.epoch(2))
    first = next(loader.epoch(2)).sample_ids
    assert not torch.equal(first, next(make(dataset, seed=4).epoch(2)).sample_ids)
    assert not torch.equal(first, next(loader.epoch(3)).sample_ids)


def test_an_epoch_goes_on_from_any_step_with_the_batches_it_would_have_had(
    dataset: ImageDataset,
) -> None:
    loader = make(dataset, augment=FULL)
    whole = list(loader.epoch(5))
    for start in (1, 4, 6):
        assert_same(iter(whole[start:]), loader.epoch(5, start_step=start))


def join_ranks(ranks: list[list[Batch]]) -> Iterator[Batch]:
    for batches in zip(*ranks, strict=True):
        yield Batch(*(torch.cat(fields) for fields in zip(*batches, strict=True)))


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_take_contiguous_parts_of_the_batches_of_one_process(
    dataset: ImageDataset, world_size: int
) -> None:
    alone = make(dataset, augment=FULL)
    ranks = [
        list(make(dataset, augment=FULL, rank=rank, world_size=world_size).epoch(1))
        for rank in range(world_size)
    ]
    assert_same(alone.epoch(1), join_ranks(ranks))


def test_a_smaller_image_size_is_the_antialiased_reduction(dataset: ImageDataset) -> None:
    loader = make(dataset)
    full, small = next(loader.epoch(0)), next(loader.epoch(0, image_size=(6, 5)))
    expected = torch.nn.functional.interpolate(full.images, (6, 5), mode="bilinear", antialias=True)
    torch.testing.assert_close(small.images, expected, atol=1e-4, rtol=0)


def test_mixing_can_be_left_out_of_an_epoch(dataset: ImageDataset) -> None:
    loader = make(dataset, augment=FULL)
    mixed, plain = next(loader.epoch(0)), next(loader.epoch(0, mix=False))
    assert mixed.targets.shape == (8, 3)
    assert mixed.targets.dtype == torch.float32
    assert torch.equal(plain.targets, plain.labels)
    assert torch.equal(mixed.sample_ids, plain.sample_ids)


def test_batches_do_not_share_memory_with_the_decoded_images(dataset: ImageDataset) -> None:
    loader = make(dataset)
    before = np.array(dataset.pixels)
    for batch in loader.epoch(0):
        batch.images.zero_()
    np.testing.assert_array_equal(dataset.pixels, before)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"batch_size": 9, "world_size": 2},
            "batch_size 9 must be a multiple of 2 and at most the 60 images",
        ),
        (
            {"batch_size": 6, "world_size": 2, "augment": FULL},
            "batch_size 6 must be a multiple of 4",
        ),
        ({"batch_size": 61}, "batch_size 61 must be .* at most the 60 images"),
    ],
)
def test_mistakes_get_a_sentence(
    dataset: ImageDataset, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        make(dataset, **changes)


# --- workers ----------------------------------


@pytest.mark.parametrize(
    "augment", [Augmentation(), GEOMETRY, FULL], ids=["plain", "geometry", "full"]
)
def test_any_number_of_workers_gives_the_same_batches(
    file_dataset: ImageDataset, augment: Augmentation
) -> None:
    alone = make(file_dataset, augment=augment, workers=0)
    expected = [list(alone.epoch(epoch)) for epoch in range(2)]
    for workers in (1, 2):
        loader = make(file_dataset, augment=augment, workers=workers)
        for epoch in range(2):
            assert_same(iter(expected[epoch]), loader.epoch(epoch))
        loader.close()


@pytest.mark.extended
def test_spawned_workers_give_the_same_batches(file_dataset: ImageDataset) -> None:
    alone = make(file_dataset, augment=GEOMETRY, workers=0)
    loader = make(file_dataset, augment=GEOMETRY, workers=1)
    assert_same(alone.epoch(1, start_step=1), loader.epoch(1, start_step=1))
    loader.close()


def test_a_sample_is_drawn_anew_each_epoch_in_workers(file_dataset: ImageDataset) -> None:
    """The fault of albumentations 2.0.8: workers repeat their random numbers every epoch."""
    loader = make(file_dataset, augment=GEOMETRY, workers=2)
    seen: dict[int, set[bytes]] = {}
    for epoch in range(6):
        for batch in loader.epoch(epoch):
            for sample, image in zip(batch.sample_ids.tolist(), batch.images, strict=True):
                seen.setdefault(sample, set()).add(image.numpy().tobytes())
    assert {len(pictures) for pictures in seen.values()} == {6}
    assert len(seen) == 24


def test_workers_share_a_batch_and_it_is_that_of_no_workers(
    file_dataset: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(file_dataset.reader, FileReader)
    (file_dataset.reader.root / file_dataset.reader.paths[5]).write_bytes(b"no image")
    source = file_dataset.subset([*range(24)] * 2)
    sizes = []
    build = DecodingWorkers.build_indices

    def record(workers: DecodingWorkers, rng: StatelessRandom) -> BatchIndices:
        sizes.append(len(rng.sample_ids))
        return build(workers, rng)

    monkeypatch.setattr(DecodingWorkers, "build_indices", record)
    read = []
    messages: list[list[str]] = [[], []]
    for workers, said in zip((0, 2), messages, strict=True):
        options = {"augment": GEOMETRY, "batch_size": 40, "max_unreadable_fraction": 0.2}
        loader = make(source, workers=workers, **options)
        read.append(
            [batch for epoch in (0, 1) for batch in loader.epoch(epoch, on_warning=said.append)]
        )
        loader.close()
    assert_same(iter(read[0]), iter(read[1]))
    assert messages[0] == messages[1] != []
    assert sizes.count(40) == 2
    assert sizes.count(20) == 4


def test_workers_flip_small_and_large_crops_alike(make_folder: MakeFolder) -> None:
    """Up to 0.1.0 small crops were flipped, and large ones weren't."""
    root = make_folder("cat/0.png", "dog/0.png")
    ramp = np.tile(np.arange(64, dtype=np.uint8)[None, :, None] * 4, (64, 1, 3))
    for path in root.glob("*/*.png"):
        Image.fromarray(ramp).save(path)
    source = open_dataset("folder", root=root).split("all").subset([0, 1] * 200)
    crop = Crop(scale=(0.08, 1.0), flip="random")
    loader = make(source, augment=Augmentation(crop=crop), workers=0, batch_size=400)
    (batch,) = loader.epoch(0)
    slope = (batch.images[:, 0, :, -1] - batch.images[:, 0, :, 0]).mean(1)
    is_large = slope.abs() > slope.abs().median()
    shares = [float((slope[group] < 0).float().mean()) for group in (is_large, ~is_large)]
    # the standard error of each share is 0.035
    assert all(0.36 < share < 0.64 for share in shares), shares


def test_samples_are_drawn_differently_from_each_other(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    root = make_folder("cat/0.png", "dog/0.png")
    for number in range(1, 12):
        for name in ("cat", "dog"):
            (root / name / f"{number}.png").write_bytes((root / "cat/0.png").read_bytes())
    source = open_dataset("folder", root=root).split("all").subset(range(12))
    scan = decode_dataset(source, size=None, cache_dir=tmp_path / "c", progress=False)
    (batch,) = make(scan, augment=GEOMETRY, workers=0, batch_size=12).epoch(0)
    assert len({image.numpy().tobytes() for image in batch.images}) == 12


def test_ranks_of_the_worker_loader_share_out_the_batches_of_one_process(
    file_dataset: ImageDataset,
) -> None:
    alone = make(file_dataset, augment=GEOMETRY, workers=0)
    ranks = [
        list(make(file_dataset, augment=GEOMETRY, workers=0, rank=rank, world_size=2).epoch(1))
        for rank in range(2)
    ]
    assert_same(alone.epoch(1), join_ranks(ranks))


def test_without_a_random_crop_workers_and_the_resident_dataset_show_the_same_pixels(
    file_dataset: ImageDataset, tmp_path: Path
) -> None:
    preprocess = replace(PREPROCESS, crop_pct=0.8)
    size, cache = preprocess.resize_size, tmp_path / "resident"
    resident_dataset = decode_dataset(file_dataset, size=size, cache_dir=cache, progress=False)
    for augment in (Augmentation(), FULL):
        resident = make(resident_dataset, augment=augment, preprocess=preprocess)
        decoding = make(file_dataset, augment=augment, preprocess=preprocess, workers=0)
        assert_same(resident.epoch(1), decoding.epoch(1))


def test_resuming_decodes_only_what_is_left(
    file_dataset: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, original = list[str](), FileReader.image

    def recording(self: FileReader, index: int) -> Any:
        read.append(self.paths[index])
        return original(self, index)

    monkeypatch.setattr(FileReader, "image", recording)
    last = list(make(file_dataset, workers=0).epoch(0, start_step=2))
    assert len(last) == 1
    assert sorted(read) == sorted(file_dataset.ids[index] for index in last[0].sample_ids)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_takes_nothing_from_anyones_random_state(
    file_dataset: ImageDataset, workers: int
) -> None:
    """Or dropout after a resume in mid-epoch would differ from that of an uninterrupted run."""

    def states() -> tuple[object, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

    before = states()
    loader = make(
        file_dataset,
        augment=replace(GEOMETRY, mixing=Mixing(mixup=0.8)),
        workers=workers,
    )
    for epoch in range(2):
        list(loader.epoch(epoch))
    loader.close()
    assert states() == before


def kill_and_read(worker: int, batches: Iterator[Batch]) -> None:
    os.kill(worker, signal.SIGKILL)
    list(batches)


def test_close_ends_the_workers_also_while_an_exception_holds_their_iterator(
    file_dataset: ImageDataset,
) -> None:
    """`close` calls torch's private `_shutdown_workers`.

    Without it torch's handler raises the killed worker's error again whenever any process that the
    program started ends, for as long as the first exception is held.
    """
    before = {process.pid for process in multiprocessing.active_children()}
    loader = make(file_dataset, augment=GEOMETRY, workers=2, batch_size=2)
    batches = loader.epoch(0)
    next(batches)
    workers = {process.pid for process in multiprocessing.active_children()} - before
    with pytest.raises((RuntimeError, ConnectionError, EOFError)) as caught:
        kill_and_read(min(workers), batches)
    loader.close()
    assert wait_until_gone(before) == set()
    for _ in range(3):
        subprocess.run(["true"], check=True)
    assert caught.value is not None  # held until here


def wait_until_gone(before: set[int]) -> set[int]:
    for _ in range(100):
        gc.collect()
        left = {process.pid for process in multiprocessing.active_children()} - before
        if not left:
            break
        time.sleep(0.05)
    return left


@pytest.mark.chaos
def test_workers_end_with_their_loader_also_when_an_epoch_is_abandoned(
    file_dataset: ImageDataset,
) -> None:
    before = {process.pid for process in multiprocessing.active_children()}
    loader = make(file_dataset, augment=GEOMETRY, workers=2)
    for _ in loader.epoch(0):
        break
    assert len({process.pid for process in multiprocessing.active_children()} - before) == 2
    expected = list(make(file_dataset, augment=GEOMETRY, workers=0).epoch(1))
    assert_same(iter(expected), loader.epoch(1))  # nothing of the abandoned epoch is left over
    loader.close()
    assert wait_until_gone(before) == set()
    assert_same(iter(expected), loader.epoch(1))  # it starts them again when needed
    del loader
    assert wait_until_gone(before) == set()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_vanishes_is_named_in_one_line(
    file_dataset: ImageDataset, workers: int
) -> None:
    (file_dataset.reader.root / "dog" / "03.png").unlink()
    loader = make(file_dataset, workers=workers)
    with pytest.warns(UserWarning, match=r"^skipped all image dog/03\.png: .*$"):
        list(loader.epoch(0))
    loader.close()


def test_shards_are_read_by_workers_like_files(file_dataset: ImageDataset, tmp_path: Path) -> None:
    import webdataset

    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(2):
        with webdataset.TarWriter(str(shards / f"{number}.tar")) as writer:
            for index in range(12 * number, 12 * number + 12):
                data = (file_dataset.reader.root / file_dataset.ids[index]).read_bytes()
                writer.write(
                    {"__key__": f"{index:02d}", "png": data, "cls": str(file_dataset.labels[index])}
                )
    source = open_dataset("webdataset", root=shards).split("all")
    scan = decode_dataset(source, size=None, cache_dir=tmp_path / "c", progress=False)
    np.testing.assert_array_equal(scan.digests, file_dataset.digests)
    files, tars = (make(dataset, augment=GEOMETRY, workers=2) for dataset in (file_dataset, scan))
    assert_same(files.epoch(0), tars.epoch(0))
    files.close()
    tars.close()


# --- which of the two -------------------------


def test_the_pipeline_is_chosen_by_the_share_of_memory_and_says_so() -> None:
    assert choose_pipeline(1000, device=torch.device("cpu"))[0] == "resident"
    kind, reason = choose_pipeline(2**50, device=torch.device("cpu"))
    assert kind == "workers"
    assert "1,073,741,824 MiB of pixels do not fit in 40% of the" in reason


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("augment", [Augmentation(), FULL, GEOMETRY])
def test_cuda_gives_the_batches_of_the_cpu(dataset: ImageDataset, augment: Augmentation) -> None:
    host = make(dataset, augment=augment)
    device = make(dataset, augment=augment, device="cuda")
    for one, other in zip(host.epoch(1), device.epoch(1), strict=True):
        assert torch.equal(one.sample_ids, other.sample_ids.cpu())
        torch.testing.assert_close(one.images, other.images.cpu(), atol=2e-2, rtol=0)
        torch.testing.assert_close(one.targets, other.targets.cpu(), atol=1e-5, rtol=0)


# --- balanced classes -------------------------


@pytest.fixture
def skewed(dataset: ImageDataset, tmp_path: Path) -> ImageDataset:
    """Thirty images of three classes: 24, 4 and 2."""
    chosen = np.sort(
        np.concatenate([np.flatnonzero(dataset.labels == label)[:20] for label in range(3)])
    )
    labels = np.repeat([0, 1, 2], [24, 4, 2])
    source = replace(dataset.subset(chosen[:30]), labels=labels)
    return decode_dataset(source, size=(12, 10), cache_dir=tmp_path / "cache", progress=False)


def test_balanced_classes_are_equally_frequent_and_large_ones_are_seen_whole_in_time(
    skewed: ImageDataset,
) -> None:
    loader = make(skewed, balanced=True, batch_size=10)
    seen: set[int] = set()
    for epoch in range(10):
        ids = torch.cat([batch.sample_ids for batch in loader.epoch(epoch)])
        labels = torch.from_numpy(skewed.labels)[ids]
        assert torch.bincount(labels).tolist() == [10, 10, 10]
        times = torch.bincount(ids, minlength=30)
        assert times[:24].max() == 1  # a large class's images at most once an epoch
        assert set(times[24:28].tolist()) == {2, 3}
        assert set(times[28:].tolist()) == {5}
        seen |= set(ids.tolist())
    assert len(seen) == 30
    assert not torch.equal(
        next(loader.epoch(0)).labels, torch.sort(next(loader.epoch(0)).labels).values
    )


def test_the_remainder_of_balanced_classes_is_shared_out_and_the_epoch_keeps_its_length(
    skewed: ImageDataset,
) -> None:
    dataset = replace(skewed, labels=np.repeat([0, 1, 2, 3], [20, 6, 2, 2]))
    loader = make(dataset, balanced=True, batch_size=30)
    (batch,) = loader.epoch(0)
    assert torch.bincount(batch.labels).tolist() == [8, 8, 7, 7]


def test_a_sample_that_is_drawn_again_is_augmented_anew(skewed: ImageDataset) -> None:
    augment = Augmentation(color_jitter=0.4)
    (batch,) = make(skewed, balanced=True, batch_size=30, augment=augment).epoch(0)
    for sample in (28, 29):
        pictures = batch.images[batch.sample_ids == sample]
        assert len({picture.numpy().tobytes() for picture in pictures}) == 5
    assert torch.equal(batch.labels, torch.from_numpy(skewed.labels)[batch.sample_ids])


@pytest.mark.parametrize("augment", [Augmentation(), FULL], ids=["plain", "full"])
def test_balanced_batches_are_a_function_of_seed_and_epoch(
    skewed: ImageDataset, augment: Augmentation
) -> None:
    alone = make(skewed, augment=augment, balanced=True)
    whole = list(alone.epoch(3))
    assert_same(iter(whole[1:]), alone.epoch(3, start_step=1))
    ranks = [
        list(make(skewed, augment=augment, balanced=True, rank=rank, world_size=2).epoch(3))
        for rank in range(2)
    ]
    assert_same(iter(whole), join_ranks(ranks))
    assert not torch.equal(whole[0].sample_ids, next(alone.epoch(4)).sample_ids)


def test_workers_balance_classes_as_the_resident_dataset_does(
    make_folder: MakeFolder, file_dataset: ImageDataset, tmp_path: Path
) -> None:
    chosen = [*range(12), 12, 13]  # 12 cats, two dogs
    source = file_dataset.subset(chosen)
    scan = decode_dataset(source, size=None, cache_dir=tmp_path / "c", progress=False)
    decoded = decode_dataset(source, size=(12, 10), cache_dir=tmp_path / "c", progress=False)
    options: dict[str, Any] = {"augment": FULL, "balanced": True, "batch_size": 4}
    resident = make(decoded, **options)
    for workers in (0, 2):
        loader = make(scan, workers=workers, **options)
        assert_same(resident.epoch(1), loader.epoch(1))
        loader.close()


def test_without_balance_an_epoch_is_the_permutation_that_it_always_was(
    dataset: ImageDataset,
) -> None:
    ids = torch.cat([batch.sample_ids for batch in make(dataset, batch_size=12).epoch(2)])
    assert torch.equal(ids, StatelessRandom(3, 2, torch.arange(60)).permutation())
