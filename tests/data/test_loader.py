"""Order and random numbers are functions of (seed, epoch, sample): of nothing else, and never the
same twice. So is it in each pipeline."""

import gc
import multiprocessing
import random
import re
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.augments import build_loader
from vit.data.augment import Augmentation
from vit.data.cache import decode_dataset
from vit.data.dataset import ImageDataset
from vit.data.loader import Batch, TrainLoader
from vit.data.open import open_dataset
from vit.data.preprocess import Preprocess
from vit.data.random import StatelessRandom

MakeFolder = Callable[..., Path]
PREPROCESS = Preprocess((12, 10))
FULL = Augmentation(
    crop_padding=2,
    flip="random",
    cutout=4,
    color_jitter=0.2,
    mixup=0.8,
    cutmix=1.0,
)
GEOMETRY = Augmentation(resized_crop_scale=(0.3, 1.0), flip="random", color_jitter=0.2)


@pytest.fixture
def dataset(array_source: ImageDataset, tmp_path: Path) -> ImageDataset:
    return decode_dataset(array_source, PREPROCESS, cache_dir=tmp_path / "cache")


@pytest.fixture
def files(make_folder: MakeFolder) -> ImageDataset:
    """Twenty-four 24×32 files."""
    root = make_folder(
        *[f"{name}/{number:02d}.png" for name in ("cat", "dog") for number in range(12)]
    )
    return open_dataset("folder", root=root).split("all")


@pytest.fixture
def damaged(files: ImageDataset) -> ImageDataset:
    """The files, of which one is cut off behind its header and one is a text."""
    root = files.reader.root
    (root / "cat/03.png").write_bytes((root / "cat/03.png").read_bytes()[:200])
    (root / "dog/05.png").write_text("no image")
    return files


def make(dataset: ImageDataset, **changes: Any) -> TrainLoader:
    options: dict[str, Any] = {
        "batch_size": 8,
        "seed": 3,
        "device": "cpu",
        "preprocess": PREPROCESS,
        "augment": Augmentation(),
        "workers": 0,
        "max_unreadable_fraction": 0.1,
    }
    return build_loader(dataset, **options | changes)


def read(loader: TrainLoader, epoch: int = 1, **options: Any) -> list[Batch]:
    with warnings.catch_warnings(action="ignore"):
        batches = list(loader.epoch(epoch, **options))
    loader.close()
    return batches


def assert_same(left: Iterable[Batch], right: Iterable[Batch]) -> None:
    pairs = list(zip(left, right, strict=True))
    assert pairs
    for one, other in pairs:
        for field, another in zip(one, other, strict=True):
            assert torch.equal(field, another)


# --- order and ranks --------------------------


def test_an_epoch_shows_every_sample_once_with_its_own_label(dataset: ImageDataset) -> None:
    loader = make(dataset, batch_size=12)
    batches = read(loader, 2)
    assert [len(batch.labels) for batch in batches] == [12] * 5
    assert len(loader) == 5
    ids = torch.cat([batch.sample_ids for batch in batches])
    assert torch.equal(ids, StatelessRandom(3, 2, torch.arange(60)).permutation())
    for batch in batches:
        assert torch.equal(batch.labels, torch.from_numpy(dataset.labels)[batch.sample_ids])
        assert torch.equal(batch.targets, batch.labels)
        expected = PREPROCESS.normalize(torch.from_numpy(dataset.pixels[batch.sample_ids.numpy()]))
        torch.testing.assert_close(batch.images, expected)
    # what doesn't fill a batch is left out
    assert [len(batch.labels) for batch in read(make(dataset))] == [8] * 7


@pytest.mark.parametrize("pipeline", ["resident", "workers", "damaged"])
def test_processes_and_the_first_step_change_no_batch(
    dataset: ImageDataset, files: ImageDataset, pipeline: str, request: pytest.FixtureRequest
) -> None:
    if pipeline == "damaged":
        request.getfixturevalue("damaged")

    def build(**changes: Any) -> TrainLoader:
        if pipeline == "resident":
            return make(dataset, augment=FULL, **changes)
        return make(files, augment=GEOMETRY, **changes)

    whole = read(build())
    for start in (1, len(whole) - 1):
        assert_same(whole[start:], read(build(), start_step=start))
    for world_size in (2, 4):
        ranks = [read(build(rank=rank, world_size=world_size)) for rank in range(world_size)]
        joined = [Batch(*map(torch.cat, zip(*parts, strict=True))) for parts in zip(*ranks)]  # noqa: B905
        assert_same(whole, joined)


def test_a_smaller_image_size_is_the_antialiased_reduction(dataset: ImageDataset) -> None:
    loader = make(dataset)
    full, small = next(loader.epoch(0)), next(loader.epoch(0, image_size=(6, 5)))
    expected = torch.nn.functional.interpolate(full.images, (6, 5), mode="bilinear", antialias=True)
    torch.testing.assert_close(small.images, expected, atol=1e-4, rtol=0)


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
    ],
)
def test_mistakes_get_a_sentence(
    dataset: ImageDataset, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        make(dataset, **changes)


# --- workers ----------------------------------


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("augment", "workers", "method"),
    [
        (Augmentation(), 1, "fork"),
        (GEOMETRY, 2, "fork"),
        (FULL, 2, "fork"),
        pytest.param(GEOMETRY, 1, "spawn", marks=pytest.mark.extended),
    ],
)
def test_any_number_of_workers_gives_the_same_batches(
    damaged: ImageDataset,
    augment: Augmentation,
    workers: int,
    method: str,
    set_start_method: Callable[[str], None],
) -> None:
    # two parts
    source = damaged.subset([*range(24)] * 2)
    said: list[list[str]] = []
    found = []
    set_start_method(method)
    for number in (0, workers):
        loader = make(source, augment=augment, workers=number, batch_size=40)
        with pytest.warns(UserWarning, match="skipped") as told:
            found.append([list(loader.epoch(epoch)) for epoch in (0, 1, 1)])
        # Python itself warns of a fork with threads
        said.append([str(each.message) for each in told if each.category is UserWarning])
        loader.close()
    for epoch in range(3):
        assert_same(found[0][epoch], found[1][epoch])
    assert said[0] == said[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_takes_nothing_from_anyones_random_state(
    files: ImageDataset, workers: int
) -> None:
    """Or dropout after a resume in mid-epoch would differ from that of an uninterrupted run."""

    def states() -> tuple[object, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

    before = states()
    augment = replace(GEOMETRY, mixup=0.8)
    loader = make(files, augment=augment, workers=workers)
    for epoch in range(2):
        list(loader.epoch(epoch))
    loader.close()
    assert states() == before


def wait_until_gone(before: set[int]) -> set[int]:
    for _ in range(100):
        gc.collect()
        left = {process.pid for process in multiprocessing.active_children()} - before
        if not left:
            break
        time.sleep(0.05)
    return left


@pytest.mark.chaos
def test_workers_end_with_their_loader_also_when_an_epoch_is_abandoned(files: ImageDataset) -> None:
    before = {process.pid for process in multiprocessing.active_children()}
    loader = make(files, augment=GEOMETRY, workers=2)
    for _ in loader.epoch(0):
        break
    assert len({process.pid for process in multiprocessing.active_children()} - before) == 2
    expected = read(make(files, augment=GEOMETRY))
    assert_same(expected, loader.epoch(1))  # nothing of the abandoned epoch is left over
    loader.close()
    assert wait_until_gone(before) == set()
    assert_same(expected, loader.epoch(1))  # it starts them again when needed
    del loader
    assert wait_until_gone(before) == set()


# --- unreadable images ------------------------


def test_an_unreadable_image_is_named_once_and_the_next_takes_its_place(
    damaged: ImageDataset,
) -> None:
    # these two come in one row, and one is the last of all
    (damaged.reader.root / "dog/11.png").unlink()
    names = {"cat/03.png", "dog/05.png", "dog/11.png"}
    loader = make(damaged, augment=GEOMETRY, max_unreadable_fraction=0.2)
    messages: list[str] = []
    for epoch in (0, 1):
        with warnings.catch_warnings(action="always", record=True) as told:
            batches = list(loader.epoch(epoch))
        messages += [str(warning.message) for warning in told]
        shown = torch.cat([batch.sample_ids for batch in batches])
        asked = StatelessRandom(3, epoch, torch.arange(24)).permutation()
        is_unreadable = torch.tensor([damaged.ids[index] in names for index in asked])
        assert is_unreadable.sum() == 3
        assert torch.equal(shown, torch.where(is_unreadable, (asked + 1) % 24, asked))
        for batch in batches:
            assert torch.equal(batch.labels, torch.from_numpy(damaged.labels)[batch.sample_ids])
    assert len(messages) == 3
    assert {re.split(r"image |: ", text)[1] for text in messages} == names


@pytest.mark.parametrize("workers", [0, 1])
def test_too_many_damaged_files_are_refused_when_they_are_met(
    damaged: ImageDataset, workers: int
) -> None:
    sentence = r"2 of 24 images can't be read, more than the allowed fraction of 0\.05"
    with pytest.raises(ValueError, match=sentence):
        read(make(damaged, max_unreadable_fraction=0.05, workers=workers), 0)
    for name in damaged.ids:
        (damaged.reader.root / name).write_text("no image")
    with pytest.raises(ValueError, match="24 of 24 images can't be read"):
        read(make(damaged, max_unreadable_fraction=1.0, workers=workers), 0)


# --- pipelines --------------------------------


@pytest.mark.parametrize("mode", ["crop", "stretch"])
def test_workers_show_the_pixels_that_are_decoded_before(
    files: ImageDataset, tmp_path: Path, mode: Any
) -> None:
    preprocess = replace(PREPROCESS, crop_pct=0.8, resize_mode=mode)
    decoded = decode_dataset(
        files,
        preprocess,
        cache_dir=tmp_path / "cache",
    )
    # random parts of the full-size images have more detail
    for augment in (Augmentation(), FULL, *([] if mode == "crop" else [GEOMETRY])):
        options = {"augment": augment, "preprocess": preprocess}
        assert_same(read(make(files, **options)), read(make(decoded, **options)))


def test_random_parts_of_full_size_images_are_those_of_decoded_ones(tmp_path: Path) -> None:
    """Of smooth photos in the shape of the input they differ by a grey level or two."""
    across, down = np.meshgrid(np.linspace(0, 3, 64), np.linspace(0, 3, 64))
    for number in range(24):
        waves = np.stack([np.sin(across + number), np.cos(down * 1.3), np.sin(across * down)], -1)
        place = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.uint8(127 + 120 * waves)).save(place)
    source = open_dataset("folder", root=tmp_path / "photos").split("all")
    grey = Preprocess((24, 24), crop_pct=24 / 64, mean=(0.0,) * 3, std=(1 / 255,) * 3)
    decoded = decode_dataset(source, grey, cache_dir=tmp_path / "cache")
    options = {
        "augment": Augmentation(resized_crop_scale=(0.2, 1.0), flip="random"),
        "preprocess": grey,
    }
    for batch, expected in zip(
        read(make(source, **options)), read(make(decoded, **options)), strict=True
    ):
        assert torch.equal(batch.sample_ids, expected.sample_ids)
        assert float((batch.images - expected.images).abs().mean()) < 1.5
        # another part would differ by more
        assert float((batch.images.flip(3) - expected.images).abs().mean()) > 4
