"""Splits are stratified, disjoint and stable; sets are found in their published layout."""

import os
import pickle
import socket
import tarfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
from PIL import Image
from torchvision import datasets

from vit.data.open import RecordedImages, open_dataset, open_for_model
from vit.data.splits import SplitRule
from vit.runtime.files import default_cache_dir

MakeFolder = Callable[..., Path]


def grid(*splits: str, classes: tuple[str, ...] = ("cat", "dog"), count: int = 10) -> list[str]:
    return [f"{split}/{name}/{n}.png" for split in splits for name in classes for n in range(count)]


# --- digits and splits --------------------


def test_digits_are_all_1797_in_three_disjoint_stratified_splits() -> None:
    dataset = open_dataset("digits")
    splits = {split: dataset.split(split) for split in ("train", "validation", "test")}
    ids = [name for source in splits.values() for name in source.ids]
    assert len(ids) == len(set(ids)) == len(open_dataset("digits").split("all")) == 1797
    totals = Counter(open_dataset("digits").split("all").labels.tolist())
    for label, total in totals.items():
        assert abs((splits["test"].labels == label).sum() - 0.2 * total) <= 1
        assert abs((splits["validation"].labels == label).sum() - 0.08 * total) <= 1.5


def test_digits_pixels_are_scaled_to_255_and_belong_to_their_ids() -> None:
    from sklearn.datasets import load_digits

    digits, source = load_digits(), open_dataset("digits").split("test")
    for index in (0, 100, 300):
        number = int(source.ids[index].removeprefix("digits/"))
        expected = np.round(digits.images[number] / 16 * 255)
        np.testing.assert_array_equal(np.asarray(source.image(index))[..., 1], expected)
        assert source.labels[index] == digits.target[number]


def test_splits_repeat_for_a_seed_and_differ_between_seeds() -> None:
    first, again, other = (
        open_dataset("digits", rule=SplitRule(split_seed=seed)).split("test") for seed in (0, 0, 1)
    )
    assert first.ids == again.ids
    assert len(set(first.ids) & set(other.ids)) < 0.4 * len(first)


def test_validation_fraction_is_kept_and_zero_leaves_none() -> None:
    assert len(
        open_dataset("digits", rule=SplitRule(validation_fraction=0.3)).split("validation")
    ) == pytest.approx(431, abs=6)
    assert len(
        open_dataset("digits", rule=SplitRule(validation_fraction=0)).split("train")
    ) == pytest.approx(1438, abs=6)
    with pytest.raises(ValueError, match="the validation split is empty"):
        open_dataset("digits", rule=SplitRule(validation_fraction=0)).split("validation")


def test_new_images_move_few_others_between_splits(make_folder: MakeFolder) -> None:
    root = make_folder(*grid(".", count=60))
    before = set(open_dataset("folder", root=root).split("test").ids)
    make_folder(*[f"{name}/new{number}.png" for name in ("cat", "dog") for number in range(10)])
    after = set(open_dataset("folder", root=root).split("test").ids)
    assert len(before - after) <= 6


def test_a_subset_of_classes_is_renumbered_in_the_sources_order() -> None:
    source = open_dataset("digits", classes=["7", "3"]).split("all")
    assert source.class_names == ("3", "7")
    assert Counter(source.labels.tolist()) == {0: 183, 1: 179}
    assert source.labels[0] == 0  # the first 3 comes before the first 7


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"name": "cifar11"}, "unknown data.name 'cifar11'; known: caltech101, "),
        ({"name": "pictures"}, "unknown data.name 'pictures'; known: caltech101, "),
        (
            {"name": "digits", "split": "dev"},
            "unknown split 'dev'; known: all, test, train, validation",
        ),
        (
            {"name": "digits", "classes": ["11", "1"]},
            "unknown class of data.classes '11'; known: 0, 1, 2",
        ),
        (
            {"name": "digits", "classes": ["1", "1"]},
            "data.classes names fewer than two classes: '1'",
        ),
        ({"name": "folder"}, "data.name=folder needs data.root"),
        ({"name": "folder", "root": "/absent"}, "data.root /absent is not a folder"),
        ({"name": "cifar10", "root": "/absent"}, "data.root /absent is not a folder"),
        ({"name": "webdataset"}, "data.name=webdataset needs data.root"),
    ],
)
def test_mistakes_get_a_sentence_with_the_value(
    arguments: dict[str, object], sentence: str
) -> None:
    split = arguments.pop("split", "train")
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        open_dataset(**arguments).split(split)


# --- folders --------------------


def test_split_folders_are_the_splits(make_folder: MakeFolder) -> None:
    root = make_folder(*grid("train", "valid", "test"))
    for split, folder in (("train", "train"), ("validation", "valid"), ("test", "test")):
        source = open_dataset("folder", root=root).split(split)
        assert list(source.ids) == sorted(grid(folder))
        assert source.class_names == ("cat", "dog")
        assert source.labels.tolist() == [0] * 10 + [1] * 10
    assert len(open_dataset("folder", root=root).split("all")) == 60


def test_val_without_test_is_the_test_split_and_validation_comes_out_of_train(
    make_folder: MakeFolder,
) -> None:
    root = make_folder(*grid("train", "val"))
    test, held = (
        open_dataset("folder", root=root).split(split) for split in ("test", "validation")
    )
    assert list(test.ids) == sorted(grid("val"))
    assert all(name.startswith("train/") for name in held.ids)
    assert Counter(held.labels.tolist()) == {0: 1, 1: 1}
    assert "val is the test split; validation images are held out of the others" in test.notes


def test_one_folder_of_classes_is_split_three_ways(make_folder: MakeFolder) -> None:
    root = make_folder(*grid("."))
    dataset = open_dataset("folder", root=root)
    splits = [set(dataset.split(split).ids) for split in ("train", "validation", "test")]
    assert [len(ids) for ids in splits] == [14, 2, 4]
    assert len(set.union(*splits)) == 20


def test_images_are_read_below_class_folders_at_any_depth(make_folder: MakeFolder) -> None:
    root = make_folder("a/deep/er/1.png", "a/2.png", "b/3.png")
    source = open_dataset("folder", root=root).split("all")
    assert list(source.ids) == ["a/2.png", "a/deep/er/1.png", "b/3.png"]
    assert source.image(2).size == (32, 24)


def test_an_empty_class_folder_is_named(make_folder: MakeFolder) -> None:
    root = make_folder(*grid("."))
    (root / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no images; remove it, or name others"):
        open_dataset("folder", root=root).split("train")
    assert len(open_dataset("folder", root=root, classes=["cat", "dog"]).split("all")) == 20


# --- labels.csv --------------------


def write_labels(root: Path, *lines: str) -> Path:
    (root / "labels.csv").write_text("\n".join(lines) + "\n")
    return root


def test_a_label_file_names_classes_and_splits(make_folder: MakeFolder) -> None:
    root = make_folder("x/1.png", "x/2.png", "3.png")
    write_labels(
        root, "path,label,split", "x/2.png,owl,train", "3.png,elk,train", '"x/1.png",elk,test'
    )
    train, test = (
        open_dataset("folder", root=root, rule=SplitRule(validation_fraction=0)).split(s)
        for s in ("train", "test")
    )
    assert (train.ids, train.labels.tolist()) == (["x/2.png", "3.png"], [1, 0])
    assert (test.ids, test.labels.tolist(), test.class_names) == (["x/1.png"], [0], ("elk", "owl"))


# --- published sets, from fixtures in their layout --------------------


@pytest.fixture
def cifar_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CIFAR-10's files with twenty pictures each; checksums are those of the fixture."""
    root = tmp_path / "cifar"
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)

    def write(name: str, content: object) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, datasets.utils.calculate_md5(folder / name)]

    def batch() -> dict[str, object]:
        return {"data": random.integers(0, 256, (20, 3072), dtype=np.uint8), "labels": [0, 1] * 10}

    monkeypatch.setattr(
        datasets.CIFAR10, "train_list", [write(f"data_batch_{n}", batch()) for n in range(1, 6)]
    )
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [write("test_batch", batch())])
    name, md5 = write("batches.meta", {"label_names": ["airplane", "automobile"]})
    monkeypatch.setattr(
        datasets.CIFAR10, "meta", {"filename": name, "key": "label_names", "md5": md5}
    )
    return root


def test_cifar_is_read_from_its_published_files(cifar_root: Path) -> None:
    train, held, test = (
        open_dataset("cifar10", root=cifar_root).split(split)
        for split in ("train", "validation", "test")
    )
    assert (len(train), len(held), len(test)) == (90, 10, 20)
    assert train.class_names == ("airplane", "automobile")
    assert not set(train.ids) & set(held.ids)
    raw = pickle.loads((cifar_root / "cifar-10-batches-py" / "test_batch").read_bytes())
    np.testing.assert_array_equal(
        np.asarray(test.image(3)), raw["data"][3].reshape(3, 32, 32).transpose(1, 2, 0)
    )
    assert test.ids[3] == "test/00003"


def fail_to_download(self: object) -> None:
    raise URLError("no route to host")


def test_a_damaged_cifar_file_is_not_read(
    cifar_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.CIFAR10, "download", fail_to_download)
    file = cifar_root / "cifar-10-batches-py" / "data_batch_2"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(OSError, match="cifar10 could not be downloaded"):
        open_dataset("cifar10", root=cifar_root).split("train")


class _SilentHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_download_is_checked_and_unpacked(
    cifar_root: Path, tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "served.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(cifar_root / "cifar-10-batches-py", arcname="cifar-10-batches-py")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_SilentHandler, directory=tmp_path))
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/served.tar.gz"
    monkeypatch.setattr(datasets.CIFAR10, "url", url)
    monkeypatch.setattr(datasets.CIFAR10, "tgz_md5", datasets.utils.calculate_md5(archive))
    try:
        assert len(open_dataset("cifar10").split("test")) == 20
    finally:
        server.shutdown()
        server.server_close()
    assert (empty_cache / "downloads" / "cifar10" / "cifar-10-batches-py").is_dir()


def test_a_failed_download_says_what_to_do_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.CIFAR10, "download", fail_to_download)
    with pytest.raises(
        OSError, match=r"could not be downloaded .*no route.*put torchvision's files of it into"
    ):
        open_dataset("cifar10", root=tmp_path).split("train")


def test_imagenette_is_found_at_its_root_or_above_it_and_has_names(make_folder: MakeFolder) -> None:
    wnids = ("n01440764", "n03888257")
    root = make_folder(*grid("imagenette2-320/train", "imagenette2-320/val", classes=wnids))
    for place in (root, root / "imagenette2-320"):
        source = open_dataset("imagenette", root=place).split("test")
        assert source.class_names == ("tench", "parachute")
        assert source.ids[0] == "val/n01440764/0.png"
    by_name, by_wnid = (
        open_dataset("imagenette", root=root, classes=names).split("train")
        for names in (["tench", "parachute"], ["n03888257", "n01440764"])
    )
    assert by_name.class_names == by_wnid.class_names == ("tench", "parachute")


def test_imagenet_without_train_folder_is_refused(make_folder: MakeFolder) -> None:
    with pytest.raises(ValueError, match="has no folders train/<wnid>"):
        open_dataset("imagenet", root=make_folder("n01/1.png", "n02/1.png")).split("train")


def test_a_source_travels_to_another_process(make_folder: MakeFolder) -> None:
    source = pickle.loads(
        pickle.dumps(open_dataset("folder", root=make_folder(*grid("."))).split("all"))
    )
    assert isinstance(source.image(0), Image.Image)


# --- what a split is made of, found once --------------------


@pytest.mark.parametrize(
    ("folders", "sentences"),
    [
        (
            ("train", "valid"),
            ["test is a split of the data", "validation is 10 % of the training images (seed 0)"],
        ),
        (
            ("train", "val", "test"),
            ["test is a split of the data", "validation is a split of the data"],
        ),
        (
            (".",),
            [
                "test is 20 % of the training images (seed 0)",
                "validation is 10 % of the rest (seed 0)",
            ],
        ),
    ],
)
def test_what_each_split_is_made_of_is_said(
    make_folder: MakeFolder, folders: tuple[str, ...], sentences: list[str]
) -> None:
    dataset = open_dataset("folder", root=make_folder(*grid(*folders)))
    assert dataset.describe_splits() == sentences


def test_each_folder_is_walked_once_whatever_is_asked(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_folder(*grid("train", "val"))
    walked: Counter[str] = Counter()
    scan = os.scandir

    def counting(top: str) -> Any:
        walked[str(top)] += 1
        return scan(top)

    monkeypatch.setattr(os, "scandir", counting)
    dataset = open_dataset("folder", root=root)
    for _ in range(2):
        for split in ("train", "validation", "test", "all"):
            dataset.split(split)
    assert set(walked.values()) == {1}
    assert len(walked) == 4


# --- what a trained model is used on --------------------


def test_without_data_it_is_the_test_split_of_the_training_data(make_folder: MakeFolder) -> None:
    root = make_folder(*grid(".", count=20))
    config = {"name": "folder", "root": str(root), "validation_fraction": 0.2, "split_seed": 3}
    splits = open_dataset(
        "folder", root=root, rule=SplitRule(validation_fraction=0.2, split_seed=3)
    )
    expected = splits.split("test")
    source = open_for_model(None, recorded=RecordedImages(config)).split()
    assert (source.split, list(source.ids)) == ("test", list(expected.ids))
    # the same folder, named: not all of it, which would be the training images
    named = open_for_model(str(root), recorded=RecordedImages(config)).split()
    assert list(named.ids) == list(expected.ids)


def test_another_folder_is_used_whole_unless_it_has_a_test_split(make_folder: MakeFolder) -> None:
    plain = make_folder(*grid(".", count=3), root="plain")
    assert len(open_for_model(str(plain), recorded=RecordedImages()).split()) == 6
    root = make_folder(*grid("train", "test", count=2), root="split")
    source = open_for_model(root, recorded=RecordedImages()).split()
    assert (source.split, len(source)) == ("test", 4)
    assert len(open_for_model(str(root), recorded=RecordedImages()).split("all")) == 8


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"name": "webdataset", "root": "http://127.0.0.1:1/{0..9}.tar"}, "not opened unasked"),
        ({"name": "huggingface", "root": "hf:owner/name"}, "not opened unasked"),
        ({"name": "cifar10"}, "cifar10 is not on this machine.*--data cifar10"),
        ({"name": "torchvision:SUN397"}, "SUN397 is not on this machine"),
        ({"name": "imagenette"}, "imagenette is not on this machine"),
    ],
)
def test_a_model_file_reaches_no_network(
    config: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("it would use the network")

    monkeypatch.setenv("VIT_CACHE", str(tmp_path))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises((ValueError, OSError), match=text):
        open_for_model(None, recorded=RecordedImages(config)).split("test")


def test_files_that_a_model_file_names_beside_its_images_are_not_read(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    root = make_folder(*grid(".", count=20))
    secret = tmp_path / "secret.txt"
    secret.write_text("path,given,label\n")
    train = open_dataset("folder", root=root).split("train")
    config = {"name": "folder", "root": str(root)}
    named = {"class_names": str(secret), "corrections": str(secret)}
    secret.chmod(0)
    recorded = RecordedImages({**config, **named})
    assert open_for_model(None, recorded=recorded).split("train").class_names == train.class_names
    # it writes nothing into a folder that a model file names
    recorded = RecordedImages({**config, "cache_dir": str(tmp_path / "theirs")})
    assert open_for_model(None, recorded=recorded).cache_dir == default_cache_dir()

    # rows of a table that lead elsewhere
    Image.new("RGB", (9, 9)).save(tmp_path / "secret.png")
    table = write_labels(root, "path,label", f"{train.ids[0]},cat", "../secret.png,dog")
    with pytest.raises(ValueError, match=r"labels\.csv line 3: \.\./secret\.png is outside"):
        open_for_model(table, recorded=recorded)


def test_what_is_no_data_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"--data cifar11 is not a data set \(.*cifar10, .*, a folder or shards"
    ):
        open_for_model("cifar11", recorded=RecordedImages())
    with pytest.raises(
        ValueError, match="doesn't say what it was trained on; name the images with --data"
    ):
        open_for_model(None, recorded=RecordedImages())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no images in folders of classes; check the path"):
        open_for_model(str(tmp_path / "empty"), recorded=RecordedImages())
