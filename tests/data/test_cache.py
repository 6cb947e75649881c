"""A dataset holds exactly the decoded pixels, is built once, never half, and again after a
change."""

import errno
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vit.data import cache as decoding
from vit.data.cache import decode_dataset
from vit.data.dataset import ImageDataset, ImageRule
from vit.data.images import read_image
from vit.data.open import open_dataset
from vit.data.preprocess import Preprocess
from vit.data.sources.base import ArrayReader, FileReader

MakeFolder = Callable[..., Path]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def build(source: ImageDataset, cache: Path, **options: object) -> ImageDataset:
    return decode_dataset(
        source,
        **{"preprocess": Preprocess((9, 8)), "cache_dir": cache} | options,
    )


def assert_same(left: ImageDataset, right: ImageDataset) -> None:
    np.testing.assert_array_equal(left.pixels, right.pixels)
    np.testing.assert_array_equal(left.hashes, right.hashes)


def folder_source(make_folder: MakeFolder, count: int = 6) -> ImageDataset:
    root = make_folder(
        *[f"{name}/{number}.png" for name in ("cat", "dog") for number in range(count)]
    )
    return open_dataset("folder", root=root).split("all")


class CountingReader(ArrayReader):
    """Notes each image that is decoded, and can break off."""

    reads: list[bytes]
    break_after = 10**9

    def __init__(self, pixels: np.ndarray) -> None:
        super().__init__(pixels)
        self.reads = []

    def image(self, index: int, **options: Any) -> Image.Image:
        self.reads.append(self.places[index].tobytes())
        if len(self.reads) > self.break_after:
            raise KeyboardInterrupt
        return super().image(index, **options)


def test_processes_and_this_process_build_the_same(
    make_folder: MakeFolder, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder_source(make_folder, count=20)
    monkeypatch.setattr(decoding, "_FEW", 0)
    monkeypatch.setattr(decoding, "_CHUNK", 7)
    many = build(source, cache / "many", workers=2)
    one = build(source, cache / "one", workers=1)
    assert_same(many, one)
    assert_same(build(source, cache / "many", workers=2), one)


class KillingReader(FileReader):
    """Kills the process that reads the first dog, once."""

    mark: Path

    def image(self, index: int, **options: Any) -> Image.Image:
        if self.names[index].startswith("dog") and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().image(index, **options)


def test_a_process_that_is_killed_is_one_error_and_the_next_run_is_right(
    make_folder: MakeFolder, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder_source(make_folder, count=20)
    monkeypatch.setattr(decoding, "_FEW", 0)
    monkeypatch.setattr(decoding, "_CHUNK", 7)
    reader = KillingReader(tmp_path / "images", source.ids)
    reader.mark = tmp_path / "killed"
    killing = replace(source, reader=reader)

    with pytest.raises(OSError, match="a data-loading worker has ended"):
        build(killing, cache, workers=2)
    assert list(cache.glob("*x*")) == list(cache.glob("*.lock"))
    assert_same(build(killing, cache, workers=2), build(source, cache / "one", workers=1))


def test_a_builder_that_died_leaves_nothing_that_is_used(
    array_source: ImageDataset, cache: Path
) -> None:
    reader = CountingReader(array_source.reader.places)
    reader.break_after = 40
    source = replace(array_source, reader=reader)
    with pytest.raises(KeyboardInterrupt):
        build(source, cache)
    assert list(cache.glob("*x*")) == list(cache.glob("*.lock"))
    # killed: nothing could clean up
    done = build(array_source, cache / "reference")
    (place,) = (cache / "reference").glob("*.decoded")
    half = cache / f"{place.stem}.0123.building"
    half.mkdir()
    (half / "images.npy").write_bytes(b"\0" * 1000)
    np.testing.assert_array_equal(build(array_source, cache).pixels, done.pixels)
    assert not half.exists()


def test_of_builders_at_once_one_builds_and_the_others_wait(
    array_source: ImageDataset, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = CountingReader(array_source.reader.places)
    source = replace(array_source, reader=counting)
    start = Barrier(4)

    def build_at_once(_: int) -> ImageDataset:
        start.wait()
        return build(source, cache)

    # each takes the lock by itself, as another process does
    with ThreadPoolExecutor(4) as pool:
        datasets = list(pool.map(build_at_once, range(4)))
    assert len(counting.reads) == len(source)
    for dataset in datasets[1:]:
        assert_same(dataset, datasets[0])


def test_unreadable_images_are_named_counted_and_left_out(
    make_folder: MakeFolder, cache: Path
) -> None:
    source = folder_source(make_folder, count=30)
    for name in ("cat/0.png", "dog/7.png", "dog/9.png"):
        path = source.reader.root / name
        path.write_bytes(path.read_bytes()[:60])
    source = open_dataset("folder", root=source.reader.root).split("all")
    for _ in range(2):  # built, then opened
        dataset = build(source, cache)
        assert [name for name, _ in dataset.unreadable] == ["cat/0.png", "dog/7.png", "dog/9.png"]
        assert "can't be read as an image" in dataset.unreadable[0][1]
        assert len(dataset) == len(dataset.pixels) == len(dataset.digests) == 57
        for index in range(57):
            pixels = Preprocess((9, 8)).to_uint8(
                read_image(source.reader.root / dataset.ids[index])
            )
            np.testing.assert_array_equal(dataset.pixels[index], pixels)
        assert dataset.labels.tolist() == [0] * 29 + [1] * 28
    with pytest.raises(
        ValueError,
        match=r"3 of 60 images can't be read, more than .* 0\.02: cat/0\.png",
    ):
        build(source, cache, max_unreadable_fraction=0.02)
    # none is readable
    unreadable = [source.ids.index(name) for name, _ in dataset.unreadable]
    for _ in range(2):  # built, then opened; a warning would fail the test
        with pytest.raises(ValueError, match="3 of 3 images can't be read"):
            build(source.subset(unreadable), cache, max_unreadable_fraction=1)


def test_fingerprint_changes_with_pixels_labels_class_order_and_split_and_with_nothing_else(
    array_source: ImageDataset, cache: Path
) -> None:
    base = build(array_source, cache).fingerprint
    order = np.random.default_rng(0).permutation(60)
    renamed = replace(array_source, ids=[f"other/{index}" for index in range(60)], name="copy")
    assert build(array_source.subset(order), cache).fingerprint == base
    assert build(renamed, cache).fingerprint == base
    assert build(array_source, cache, preprocess=Preprocess((3, 3))).fingerprint == base
    pixels = array_source.reader.places.copy()
    pixels[17, 0, 0, 0] ^= 1
    labels = array_source.labels.copy()
    labels[[3, 4]] = labels[[4, 3]]
    changed = [
        replace(array_source, reader=ArrayReader(pixels)),
        replace(array_source, labels=labels),
        replace(array_source, class_names=("b", "a", "c")),
        replace(array_source, split="test"),
        array_source.subset(range(59)),
    ]
    fingerprints = [build(source, cache).fingerprint for source in changed]
    assert len({base, *fingerprints}) == 6


def test_a_full_disk_is_one_error_and_leaves_no_rest(
    array_source: ImageDataset, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        build(array_source, cache)
    assert list(cache.glob("*x*")) == list(cache.glob("*.lock"))


def test_the_cache_cannot_be_changed_through_its_pixels(
    array_source: ImageDataset, cache: Path
) -> None:
    dataset = build(array_source, cache)
    before = np.array(dataset.pixels[0])
    dataset.pixels.stored[0] = 0
    np.testing.assert_array_equal(build(array_source, cache).pixels[0], before)


def test_an_image_is_known_by_its_bytes_and_decoded_once(
    make_folder: MakeFolder, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder_source(make_folder)
    root = source.reader.root
    first = build(source, cache)
    monkeypatch.setattr(decoding, "_decode_chunk", None)
    # another label, other class names, another split's name
    assert_same(build(replace(source, labels=1 - source.labels), cache), first)
    assert_same(build(replace(source, class_names=("a", "b"), split="train"), cache), first)
    # permissions, times, another place
    for image in root.rglob("*.png"):
        image.chmod(0o600)
        os.utime(image)
    assert_same(build(source, cache), first)
    moved = root.rename(tmp_path / "moved")
    assert_same(build(open_dataset("folder", root=moved).split("all"), cache), first)


def test_another_seed_or_fraction_of_the_splits_decodes_nothing_again(
    make_folder: MakeFolder, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder_source(make_folder, count=20)
    root = source.reader.root
    (root / "dog/3.png").write_text("no image")

    def build_all(**rule: Any) -> set[str]:
        splits = open_dataset("folder", root=root, rule=ImageRule(**rule))
        shown = set()
        for name in ("train", "validation", "test"):
            split = splits.split(name)
            found = build(split, cache, together=splits.pool, max_unreadable_fraction=0.5)
            expected = [Preprocess((9, 8)).to_uint8(read_image(root / each)) for each in found.ids]
            np.testing.assert_array_equal(found.pixels, expected)
            # the loader's images are those of the split alone
            assert len(found.pixels) == len(found) == len(split) - len(found.unreadable)
            shown |= {*found.ids, *(each for each, _ in found.unreadable)}
        return shown

    everything = build_all()
    assert len(everything) == 40
    monkeypatch.setattr(decoding, "_decode_chunk", None)
    assert build_all(split_seed=7) == everything
    assert build_all(validation_fraction=0.4, test_fraction=0.3) == everything


def test_folders_that_nobody_opens_are_removed(make_folder: MakeFolder, cache: Path) -> None:
    source = folder_source(make_folder)
    fingerprints = set()
    for number in range(3):
        Image.new("RGB", (32, 24), (number, 0, 0)).save(source.reader.root / source.ids[3])
        found = build(source, cache)
        assert found.pixels[3][0, 0, 0] == number
        fingerprints.add(found.fingerprint)
    assert len(fingerprints) == 3
    (cache / "my-4x4-photos").mkdir()
    folders = list(cache.glob("*.decoded"))
    for folder in (*folders, cache / "my-4x4-photos"):
        os.utime(folder, (0, 0))
    # opened again, it is young
    build(source, cache)
    build(source, cache, preprocess=Preprocess((4, 4)))
    assert len(set(cache.glob("*.decoded")) & set(folders)) == 1
    assert len(list(cache.glob("*.decoded"))) == 2
    assert (cache / "my-4x4-photos").exists()


def test_a_file_that_is_replaced_by_one_of_its_size_and_time_is_decoded_again(
    make_folder: MakeFolder, cache: Path
) -> None:
    source = folder_source(make_folder)
    build(source, cache)
    path = source.reader.root / "cat/0.png"
    stat, size = path.stat(), read_image(path).size
    Image.new("RGB", size, (9, 90, 200)).save(path)
    # bytes behind the end of an image count nowhere
    content = path.read_bytes()
    assert len(content) <= stat.st_size
    path.write_bytes(content + bytes(stat.st_size - len(content)))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    again = open_dataset("folder", root=source.reader.root).split("all")
    assert (build(again, cache).pixels[0] == (9, 90, 200)).all()
