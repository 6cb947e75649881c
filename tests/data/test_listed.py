"""Images that don't fit memory: training begins when they are listed, and what a scan finds is known an epoch later."""

import pickle
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ImageFile

from vit.data.augment import Augment
from vit.data.cache import decode_dataset
from vit.data.images import Preprocess
from vit.data.listed import ListedDataset
from vit.data.loaders import Batch, WorkerLoader
from vit.data.open import open_dataset
from vit.data.random import StatelessRandom
from vit.data.sets.source import ImageSource, StoredReader
from vit.runtime.processes import Process

MakeFolder = Callable[..., Path]
ALONE = Process()


@pytest.fixture
def source(make_folder: MakeFolder) -> ImageSource:
    """Forty 24×32 files, of which one is cut off behind its header and one is a text."""
    root = make_folder(*[f"{name}/{number:02d}.png" for name in ("cat", "dog") for number in range(20)])
    (root / "cat/03.png").write_bytes((root / "cat/03.png").read_bytes()[:200])
    (root / "dog/05.png").write_text("no image")
    return open_dataset("folder", root=root).split("all")


def listed(source: ImageSource, cache: Path, **changes: Any) -> ListedDataset:
    return ListedDataset.open(source, **{"max_unreadable_fraction": 0.1, "cache_dir": cache, "workers": 0} | changes)


def load(dataset: ListedDataset, **changes: Any) -> WorkerLoader:
    options: dict[str, Any] = {"batch_size": 8, "seed": 3, "device": "cpu", "num_classes": 2, "workers": 0}
    augment = Augment(resized_crop_scale=(0.3, 1.0), flip="random", color_jitter=0.2)
    return WorkerLoader(dataset, preprocess=Preprocess((12, 10)), augment=augment, **options | changes)


def assert_same(one: list[Batch], other: list[Batch]) -> None:
    assert len(one) == len(other) > 0
    assert all(torch.equal(*fields) for pair in zip(one, other, strict=True) for fields in zip(*pair, strict=True))


def test_headers_are_checked_without_decoding(source: ImageSource, tmp_path: Path, monkeypatch: Any) -> None:
    dataset = listed(source, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(ImageFile.ImageFile, "load", None)
        dataset.check_headers(ALONE)
    (found,) = dataset.unreadable
    assert found[0] == "dog/05.png"
    assert "none of AVIF" in found[1]
    assert len(dataset) == 40


def test_too_many_files_that_are_no_images_are_refused_at_the_start(source: ImageSource, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"1 of 40 images can't be read, more than the allowed fraction of 0\.02; .*05"
    ):
        listed(source, tmp_path, max_unreadable_fraction=0.02).check_headers(ALONE)


def test_after_an_epoch_all_is_known_that_a_scan_finds(source: ImageSource, tmp_path: Path) -> None:
    dataset = listed(source, tmp_path / "cache")
    batches = list(load(dataset).epoch(0))
    assert dataset.completed() is dataset
    dataset.finish_epoch(ALONE)
    scan = decode_dataset(source, size=None, cache_dir=tmp_path / "other", progress=False)
    found = dataset.completed()
    assert found.fingerprint == scan.fingerprint != dataset.fingerprint
    assert found.ids == scan.ids
    np.testing.assert_array_equal(found.digests, scan.digests)
    np.testing.assert_array_equal(found.perceptual, scan.perceptual)
    assert [name for name, _ in found.unreadable] == ["cat/03.png", "dog/05.png"]
    assert found.unreadable == scan.unreadable
    shown = torch.cat([batch.sample_ids for batch in batches])
    assert len(shown) == 40
    assert not {source.ids[index] for index in shown.tolist()} & {"cat/03.png", "dog/05.png"}
    for batch in batches:  # the label is that of the image in place of the unreadable one
        assert torch.equal(batch.labels, torch.from_numpy(source.labels)[batch.sample_ids])


def test_what_is_known_of_the_files_changes_no_batch(source: ImageSource, tmp_path: Path) -> None:
    """Nor does the number of workers or processes, nor where an epoch goes on."""
    first = listed(source, tmp_path / "cache")
    whole = [list(load(first).epoch(epoch)) for epoch in (0, 1)]
    first.finish_epoch(ALONE)
    known = listed(source, tmp_path / "cache")  # from the cache
    assert known.is_complete
    checked = listed(source, tmp_path / "none")
    checked.check_headers(ALONE)
    for dataset in (known, checked):
        for epoch in (0, 1):
            assert_same(whole[epoch], list(load(dataset).epoch(epoch)))
    assert_same(whole[1][2:], list(load(listed(source, tmp_path / "none")).epoch(1, start_step=2)))
    for workers, method in ((1, "fork"), (2, "fork"), (1, "spawn")):
        loader = load(listed(source, tmp_path / "none"), workers=workers, start_method=method)
        assert_same(whole[0], list(loader.epoch(0)))
        assert_same(whole[1], list(loader.epoch(1)))
        loader.close()
    ranks = [list(load(listed(source, tmp_path / "none"), rank=r, world_size=2).epoch(0)) for r in (0, 1)]
    together = [Batch(*map(torch.cat, zip(*pair, strict=True))) for pair in zip(*ranks, strict=True)]
    assert_same(whole[0], together)


def test_without_unreadable_files_the_batches_are_those_of_a_scan(make_folder: MakeFolder, tmp_path: Path) -> None:
    root = make_folder(*[f"{name}/{number:02d}.png" for name in ("cat", "dog") for number in range(10)])
    source = open_dataset("folder", root=root).split("all")
    scan = decode_dataset(source, size=None, cache_dir=tmp_path / "cache", progress=False)
    expected = list(load(scan).epoch(2))  # type: ignore[arg-type]
    assert_same(expected, list(load(listed(source, tmp_path / "none")).epoch(2)))


def test_too_many_damaged_files_are_refused_when_they_are_met(source: ImageSource, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"2 of 40 images can't be read, more than the allowed fraction of 0\.04"):
        list(load(listed(source, tmp_path, max_unreadable_fraction=0.04)).epoch(0))


def test_a_file_that_was_read_and_vanishes_is_an_error(source: ImageSource, tmp_path: Path) -> None:
    dataset = listed(source, tmp_path)
    list(load(dataset).epoch(0))
    Path(source.reader.root, "cat/07.png").unlink()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"^cat/07\.png was readable before, but no longer: "):
        list(load(dataset).epoch(1))


def test_a_checkpoint_holds_what_is_known(source: ImageSource, tmp_path: Path) -> None:
    dataset, other = listed(source, tmp_path), listed(source, tmp_path)
    batches = load(dataset).epoch(0)
    next(batches), next(batches)
    known = dataset.collect(ALONE)
    assert 14 <= len(known["read"]) <= 16
    other.restore(known)
    np.testing.assert_array_equal(other.state, dataset.state)
    np.testing.assert_array_equal(other.digests, dataset.digests)
    other.finish_epoch(ALONE)
    assert other.completed().fingerprint == decode_dataset(source, size=None, cache_dir=tmp_path / "other").fingerprint


def test_a_worker_is_sent_no_more_of_many_images(make_folder: MakeFolder, tmp_path: Path) -> None:
    """Paths and hashes of all images stay in the main process."""
    root = make_folder(*[f"{name}/{number:02d}.png" for name in ("cat", "dog") for number in range(20)])
    few = open_dataset("folder", root=root).split("all")
    many = few.subset(np.arange(20_000) % 40)
    sizes = []
    for source in (few, many):
        loader = load(listed(source, tmp_path))
        task = loader._build_task(StatelessRandom(0, 0), torch.arange(8))
        sent = loader._decode.__dict__ | {"geometry": None}  # holds random generators, which differ in size as pickles
        sizes.append(len(pickle.dumps((sent, task))))
    assert abs(sizes[0] - sizes[1]) < 100  # a name that stands there once or twice


def test_processes_tell_each_other_what_they_found(source: ImageSource, tmp_path: Path) -> None:
    ranks = [listed(source, tmp_path / str(rank)) for rank in range(2)]
    for rank, dataset in enumerate(ranks):
        list(load(dataset, rank=rank, world_size=2).epoch(0))
    assert all(dataset.state.sum() < 40 for dataset in ranks)
    found = [dataset.collect(ALONE) for dataset in ranks]

    class Together(Process):
        def exchange(self, value: Any) -> list[Any]:
            return found

    for rank, dataset in enumerate(ranks):
        dataset.collect(Together(rank, 2))
        np.testing.assert_array_equal(dataset.state, ranks[0].state)
        np.testing.assert_array_equal(dataset.digests, ranks[0].digests)
    assert [sorted(dataset.unreadable) for dataset in ranks] == [sorted(ranks[0].unreadable)] * 2
    assert len(ranks[0].unreadable) == 2


def test_a_run_is_known_by_names_sizes_and_labels(source: ImageSource, tmp_path: Path) -> None:
    known = listed(source, tmp_path / "cache").fingerprint
    root = Path(source.reader.root)  # type: ignore[attr-defined]
    shutil.copytree(root, tmp_path / "moved")  # the times are others
    for change, is_same in ((None, True), ("cat/04.png", False)):
        if change:
            with (tmp_path / "moved" / change).open("ab") as file:
                file.write(b"\0")
        moved = open_dataset("folder", root=tmp_path / "moved").split("all")
        assert (listed(moved, tmp_path / "cache").fingerprint == known) == is_same
    labels = replace(source, labels=1 - source.labels)
    assert listed(labels, tmp_path / "cache").fingerprint != known


def test_images_in_shards_are_checked_and_measured_as_files_are(source: ImageSource, tmp_path: Path) -> None:
    root = Path(source.reader.root)  # type: ignore[attr-defined]
    for number in range(2):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as tar:
            for name in source.ids[number::2]:
                (tmp_path / "label").write_text(name.split("/")[0])
                tar.add(root / name, name.replace("/", "-"))
                tar.add(tmp_path / "label", name.replace("/", "-").replace(".png", ".cls"))
    shards = open_dataset("webdataset", root=tmp_path).split("all")
    dataset = listed(shards, tmp_path / "cache")
    dataset.check_headers(ALONE)
    assert [name for name, _ in dataset.unreadable] == ["1.tar/dog-05"]
    order = [source.ids.index(name.partition("/")[2].replace("-", "/") + ".png") for name in shards.ids]
    assert isinstance(shards.reader, StoredReader)
    assert isinstance(source.reader, StoredReader)
    np.testing.assert_array_equal(shards.reader.sizes(), source.reader.sizes()[order])
    list(load(dataset).epoch(0))
    dataset.finish_epoch(ALONE)
    assert dataset.completed().fingerprint == decode_dataset(source, size=None, cache_dir=tmp_path).fingerprint
