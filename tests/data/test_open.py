"""Splits are stratified, disjoint and stable; folders and published sets are found in their layout."""

import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vit.data.dataset import ImageRule
from vit.data.open import open_dataset, open_for_model

MakeFolder = Callable[..., Path]


def grid(*splits: str, classes: tuple[str, ...] = ("cat", "dog"), count: int = 10) -> list[str]:
    return [f"{split}/{name}/{n}.png" for split in splits for name in classes for n in range(count)]


# --- digits and splits --------------------


def test_digits_are_all_1797_in_three_disjoint_stratified_splits() -> None:
    dataset = open_dataset("digits")
    splits = {split: dataset.split(split) for split in ("train", "validation", "test")}
    ids = [name for source in splits.values() for name in source.ids]
    assert len(ids) == len(set(ids)) == len(dataset.split("all")) == 1797
    totals = Counter(dataset.split("all").labels.tolist())
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
        open_dataset("digits", rule=ImageRule(split_seed=seed)).split("test") for seed in (0, 0, 1)
    )
    assert first.ids == again.ids
    assert len(set(first.ids) & set(other.ids)) < 0.4 * len(first)


def test_a_subset_has_each_image_with_its_own_label() -> None:
    digits = open_dataset("digits").split("all")
    chosen = [7, 3, 1500, 3]
    subset = digits.subset(chosen)
    assert subset.labels.tolist() == digits.labels[chosen].tolist()
    assert list(subset.ids) == [digits.ids[index] for index in chosen]
    assert [subset.image(place) for place in range(4)] == list(map(digits.image, chosen))


def test_a_class_of_three_images_has_one_in_each_split(make_folder: MakeFolder) -> None:
    root = make_folder(
        *[f"{name}/{n}.png" for name in ("cat", "dog") for n in range(40)],
        *[f"rare/{n}.png" for n in range(3)],
    )
    splits = open_dataset("folder", root=root)
    for name in ("train", "validation", "test"):
        assert splits.split(name).class_counts[2] == 1


def test_validation_fraction_is_kept_and_zero_leaves_none() -> None:
    third, none = (
        open_dataset("digits", rule=ImageRule(validation_fraction=part)) for part in (0.3, 0)
    )
    assert len(third.split("validation")) == pytest.approx(431, abs=6)
    assert len(none.split("train")) == pytest.approx(1438, abs=6)
    with pytest.raises(ValueError, match="the validation split is empty"):
        none.split("validation")


def test_new_images_move_few_others_between_splits(make_folder: MakeFolder) -> None:
    root = make_folder(*grid(".", count=60))
    before = set(open_dataset("folder", root=root).split("test").ids)
    make_folder(*[f"{name}/new{number}.png" for name in ("cat", "dog") for number in range(10)])
    after = set(open_dataset("folder", root=root).split("test").ids)
    assert len(before - after) <= 6


def test_a_subset_of_classes_is_renumbered_in_the_sources_order() -> None:
    source = open_dataset("digits", rule=ImageRule(classes=["7", "3"])).split("all")
    assert source.class_names == ("3", "7")
    assert Counter(source.labels.tolist()) == {0: 183, 1: 179}
    assert source.labels[0] == 0  # the first 3 comes before the first 7


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"name": "digits", "split": "dev"}, "unknown split 'dev'; known: all, test, "),
        (
            {"name": "digits", "rule": ImageRule(classes=["11", "1"])},
            "unknown class of data.classes '11'",
        ),
        ({"name": "digits", "rule": ImageRule(classes=["1"])}, "classes: '1'; keep more of them"),
        ({"name": "folder"}, "data.name=folder needs data.root"),
        ({"name": "cifar10", "root": "/absent"}, "data.root /absent is not a folder"),
    ],
)
def test_mistakes_get_a_sentence_with_the_value(
    arguments: dict[str, object], sentence: str
) -> None:
    split = arguments.pop("split", "train")
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        open_dataset(**arguments).split(split)


# --- folders --------------------


@pytest.mark.parametrize(
    ("folders", "counts", "sentences"),
    [
        (["train", "valid", "test"], [20, 20, 20], ["test is a split of the data"]),
        # ImageNet's val
        (["train", "val"], [18, 2, 20], ["validation is 10 % of the training images (seed 0)"]),
        (["."], [14, 2, 4], ["test is 20 % of the training images (seed 0)"]),
    ],
)
def test_what_a_folder_lacks_is_held_out_of_the_training_images(
    make_folder: MakeFolder, folders: list[str], counts: list[int], sentences: list[str]
) -> None:
    dataset = open_dataset("folder", root=make_folder(*grid(*folders)))
    splits = [dataset.split(split) for split in ("train", "validation", "test")]
    assert [len(split) for split in splits] == counts
    assert len({image_id for split in splits for image_id in split.ids}) == sum(counts)
    assert len(dataset.split("all")) == sum(counts)
    for split in splits:
        assert split.class_names == ("cat", "dog")
        assert Counter(split.labels.tolist()) == dict.fromkeys((0, 1), len(split) // 2)
    assert set(sentences) <= set(dataset.describe_splits())
    is_imagenet = "val" in folders
    assert ("val is the test split" in " ".join(splits[2].notes)) == is_imagenet
    if folders != ["."]:
        assert list(splits[2].ids) == sorted(grid(folders[-1]))


def test_an_empty_class_folder_is_named(make_folder: MakeFolder) -> None:
    root = make_folder(*grid("."))
    (root / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no images; remove it, or name others"):
        open_dataset("folder", root=root).split("train")
    two = ImageRule(classes=["cat", "dog"])
    assert len(open_dataset("folder", root=root, rule=two).split("all")) == 20


def test_imagenette_is_found_at_its_root_or_above_it_and_has_names(make_folder: MakeFolder) -> None:
    wnids = ("n01440764", "n03888257")
    root = make_folder(*grid("imagenette2-320/train", "imagenette2-320/val", classes=wnids))
    for place in (root, root / "imagenette2-320"):
        source = open_dataset("imagenette", root=place).split("test")
        assert source.class_names == ("tench", "parachute")
        assert source.ids[0] == "val/n01440764/0.png"
    for names in (["tench", "parachute"], ["n03888257", "n01440764"]):
        rule = ImageRule(classes=names)
        chosen = open_dataset("imagenette", root=root, rule=rule).split("train")
        assert chosen.class_names == ("tench", "parachute")


# --- what a trained model is used on --------------------


def test_without_data_it_is_the_test_split_of_the_training_data(make_folder: MakeFolder) -> None:
    root = make_folder(*grid(".", count=20))
    config = {"name": "folder", "root": str(root), "validation_fraction": 0.2, "split_seed": 3}
    splits = open_dataset(
        "folder", root=root, rule=ImageRule(validation_fraction=0.2, split_seed=3)
    )
    expected = splits.split("test")
    source = open_for_model(None, recorded=config).split()
    assert (source.split, list(source.ids)) == ("test", list(expected.ids))
    # the same folder, named: not all of it, which would be the training images
    named = open_for_model(str(root), recorded=config).split()
    assert list(named.ids) == list(expected.ids)


def test_another_folder_is_used_whole_unless_it_has_a_test_split(make_folder: MakeFolder) -> None:
    plain = make_folder(*grid(".", count=3), root="plain")
    assert len(open_for_model(str(plain), recorded={}).split()) == 6
    root = make_folder(*grid("train", "test", count=2), root="split")
    source = open_for_model(root, recorded={}).split()
    assert (source.split, len(source)) == ("test", 4)


def test_other_images_are_labelled_as_those_of_the_training_were(make_folder: MakeFolder) -> None:
    root = make_folder(*[f"cat.{n}.png" for n in range(2)], *[f"dog.{n}.png" for n in range(2)])
    recorded: dict[str, Any] = {"name": "folder", "root": "/elsewhere", "label_by": "([a-z]+)[.]"}
    assert open_for_model(root, recorded=recorded).split().class_names == ("cat", "dog")
    table = root / "new.csv"
    table.write_text(
        "path,label,patient,part\ncat.0,cat,o,train\ncat.1,cat,p,test\n"
        "dog.0,dog,q,test\ndog.1,dog,r,train\n"
    )
    recorded |= {"group_column": "patient", "split_column": "part"}
    images = open_for_model(table, recorded=recorded).split()
    assert (images.ids, images.groups) == (["cat.1.png", "dog.0.png"], ["p", "q"])
    # what the user names comes first
    named = open_for_model(table, recorded=recorded, rule=ImageRule(label_column="label"))
    assert named.split("all").groups is None


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"name": "webdataset", "root": "http://127.0.0.1:1/{0..9}.tar"}, "No such file"),
        ({"name": "huggingface", "root": "hf:owner/name"}, "not downloaded unasked"),
        ({"name": "cifar10"}, "cifar10 is not on this machine.*--data cifar10"),
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
        open_for_model(None, recorded=config).split("test")


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
    recorded = {**config, **named}
    assert open_for_model(None, recorded=recorded).split("train").class_names == train.class_names

    # rows of a table that lead elsewhere
    Image.new("RGB", (9, 9)).save(tmp_path / "secret.png")
    table = root / "labels.csv"
    table.write_text(f"path,label\n{train.ids[0]},cat\n../secret.png,dog\n")
    with pytest.raises(
        ValueError, match=r"labels\.csv line 3: \.\./secret\.png is not an image, .* below"
    ):
        open_for_model(table, recorded=recorded)


def test_what_is_no_data_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="doesn't say what it was trained on"):
        open_for_model(None, recorded={})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no images in folders of classes; move them"):
        open_for_model(str(tmp_path / "empty"), recorded={})
