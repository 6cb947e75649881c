"""Images of one group, and copies, are never on both sides of a split."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import save_noise
from vit.config import load_config
from vit.data import groups as groups_module
from vit.data import splits as splits_module
from vit.data.dataset import ImageRule
from vit.data.duplicates import find_pairs
from vit.data.groups import choose_whole_groups, find_groups, hash_images, join_duplicates
from vit.data.open import open_dataset, open_for_model

BURST = 5


def save_bursts(root: Path, *, num_bursts: int, suffix: str = "png") -> None:
    """Bursts of two classes: a random picture and pictures hardly different from it."""
    rng = np.random.default_rng(0)
    for number in range(num_bursts):
        folder = root / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        coarse = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        picture = np.asarray(Image.fromarray(coarse).resize((64, 64), Image.Resampling.BICUBIC))
        for shot in range(BURST):
            noise = rng.integers(-3, 4, picture.shape)
            pixels = np.clip(picture + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"s{shot}_site{number:02}.{suffix}")


def read_bursts(ids: list[str]) -> set[str]:
    return {Path(image_id).stem.partition("_")[2] for image_id in ids}


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_near_duplicates_are_on_one_side_and_the_plan_says_so(tmp_path: Path, suffix: str) -> None:
    save_bursts(tmp_path, num_bursts=20, suffix=suffix)
    naive = open_dataset("folder", root=tmp_path)
    names = ("train", "validation", "test")
    bursts = [read_bursts(list(naive.split(name).ids)) for name in names]
    assert bursts[0] & bursts[1]
    assert bursts[0] & bursts[2]

    grouped = open_dataset("folder", root=tmp_path, rule=ImageRule(group_duplicates=True))
    splits = [grouped.split(name) for name in names]
    bursts = [read_bursts(list(split.ids)) for split in splits]
    assert sum(map(len, bursts)) == len(set().union(*bursts)) == 20
    assert [len(split) for split in splits] == [70, 10, 20]
    assert any(
        "100 images have a copy or a near-copy" in text for text in grouped.describe_splits()
    )
    # whoever evaluates the model gets the same test images
    trained_on = load_config(
        {"data": {"name": "folder", "root": str(tmp_path), "group_duplicates": True}}
    ).data.model_dump()
    again = open_for_model(None, recorded=trained_on).split("test")
    assert list(again.ids) == list(splits[2].ids)


def test_images_without_copies_are_split_as_if_nobody_had_looked(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for number in range(40):
        folder = tmp_path / ("cat", "dog")[number % 2]
        folder.mkdir(exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        coarse.resize((64, 64)).save(folder / f"{number}.png")
    splits = [
        open_dataset("folder", root=tmp_path, rule=ImageRule(group_duplicates=looks))
        for looks in (True, False)
    ]
    assert splits[0].split("test").ids == splits[1].split("test").ids
    assert splits[0].describe_splits() == splits[1].describe_splits()


def test_a_class_of_copies_alone_is_split_all_the_same() -> None:
    ids = [f"{number}.png" for number in range(8)]
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    # of class 0 all are one image, of class 1 the first two
    hashes = np.array([[7, 7, 7, 7, 1, 1, 2, 3], [0] * 8], dtype=np.uint64)
    groups, num_copies, _, num_alike = join_duplicates(ids, labels, hashes, num_splits=3)
    assert groups == ("0.png", "1.png", "2.png", "3.png", "4.png", "4.png", "6.png", "7.png")
    assert (num_copies, num_alike) == (2, 4)


def save_textures(root: Path, *, num_good: int, num_defect: int) -> None:
    """Photos of brushed metal under a lamp: noise along one direction and some shade of light."""
    rng = np.random.default_rng(0)
    light = 1 - 0.3 * np.hypot(*np.mgrid[-1:1:64j, -1:1:64j])
    for number in range(num_good + num_defect):
        folder = root / ("good" if number < num_good else "defect")
        folder.mkdir(parents=True, exist_ok=True)
        brushed = rng.normal(0, 6, (64, 1)) + rng.normal(0, 3, (64, 64))
        grey = np.clip(150 * light * rng.uniform(0.92, 1.08) + brushed, 0, 255).astype(np.uint8)
        if number >= num_good:
            grey[20:30, 30 + number % 9] = 20
        Image.fromarray(grey).save(folder / f"{number:04}.png")


def test_photos_of_one_texture_are_no_copies(tmp_path: Path) -> None:
    save_textures(tmp_path, num_good=200, num_defect=20)
    save_bursts(tmp_path, num_bursts=8)
    splits = open_dataset("folder", root=tmp_path, rule=ImageRule(group_duplicates=True))
    shares = {
        name: splits.split(name).class_counts[splits.split(name).class_names.index("good")] / 200
        for name in ("train", "validation", "test")
    }
    assert 0.15 <= shares["test"] <= 0.25
    assert 0.05 <= shares["validation"] <= 0.15
    # bursts are on one side all the same
    sides = [
        read_bursts([name for name in splits.split(split).ids if "_site" in name])
        for split in ("train", "validation", "test")
    ]
    assert sum(map(len, sides)) == len(set().union(*sides))


def test_near_copies_form_no_chain() -> None:
    # each image is within six bits of the next one, and far from the others
    dhash = 0x9D3C0F5A6B71E284
    hashes = [[], []]
    for number in range(12):
        hashes[0].append(number)
        hashes[1].append(dhash)
        for bit in range(5):
            dhash ^= 1 << (5 * number + bit)
    ids = [f"{number}.png" for number in range(12)]
    digests = np.array(hashes, np.uint64)
    groups, *_ = join_duplicates(ids, np.zeros(12, int), digests, num_splits=2)
    members = {group: [] for group in groups}
    for group, value in zip(groups, hashes[1], strict=True):
        members[group].append(value)
    assert len(members) > 3
    for values in members.values():
        assert max((first ^ second).bit_count() for first in values for second in values) <= 12


def test_copies_are_found_behind_any_number_of_others(tmp_path: Path) -> None:
    for number in range(160):
        folder = tmp_path / ("cat", "dog")[number % 2]
        folder.mkdir(exist_ok=True)
        # 150 copies of one image, and a pair after them
        seed = 0 if number < 150 else 1000 if number > 157 else number
        coarse = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((64, 64)).save(folder / f"{number:03}.png")
    dataset = open_dataset("folder", root=tmp_path).split("all")
    pairs = find_pairs(hash_images(dataset))
    found = {dataset.ids[index] for pair in pairs for index in pair[:2]}
    assert {"cat/158.png", "dog/159.png"} <= found
    assert len(pairs) == 150


def test_many_images_are_compared_by_their_bytes_and_the_plan_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_bursts(tmp_path, num_bursts=8)
    copied = sorted((tmp_path / "cat").iterdir())[0]
    shutil.copy(copied, tmp_path / "cat" / "copy.png")
    for module in (groups_module, splits_module):
        monkeypatch.setattr(module, "MAX_COMPARED", 10)
    splits = open_dataset("folder", root=tmp_path, rule=ImageRule(group_duplicates=True))
    sides = {
        image_id: name
        for name in ("train", "validation", "test")
        for image_id in splits.split(name).ids
    }
    assert sides["cat/copy.png"] == sides[f"cat/{copied.name}"]
    text = " ".join(splits.describe_splits())
    assert "of more than 10 images, copies are found by their bytes alone" in text
    assert "2 images have a copy" in text


def test_images_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_bursts(tmp_path / "photos", num_bursts=8)
    dataset = open_dataset("folder", root=tmp_path / "photos").split("all")
    first = hash_images(dataset)
    monkeypatch.setattr(groups_module, "compute_dhash", pytest.fail)
    for image in (tmp_path / "photos").rglob("*.png"):
        image.chmod(0o600)
    np.testing.assert_array_equal(hash_images(dataset), first)


def test_groups_stay_whole_and_classes_near_the_fraction() -> None:
    rng = np.random.default_rng(0)
    sites = rng.integers(0, 60, 900)
    labels = (sites + rng.integers(0, 2, 900)) % 3
    groups = [f"site{site}" for site in sites]
    mask = choose_whole_groups(groups, labels, fraction=0.2, salt="")
    assert not set(sites[mask]) & set(sites[~mask])
    shares = [mask[labels == label].mean() for label in range(3)]
    assert np.abs(np.array(shares) - 0.2).max() < 0.05
    # two large groups a class: one of them, though it is more than the fraction
    mask = choose_whole_groups(
        list("aaaabbbbccccdddd"), np.repeat([0, 1], 8), fraction=0.1, salt=""
    )
    assert Counter(np.array(list("aaaabbbbccccdddd"))[mask]).total() == 8


def test_groups_come_from_folders_an_expression_or_a_table(tmp_path: Path) -> None:
    save_bursts(tmp_path / "photos", num_bursts=12)
    dataset = open_dataset("folder", root=tmp_path / "photos").split("all")
    found = find_groups(dataset, r"_(site\d+)")
    assert set(found) == {f"site{number:02}" for number in range(12)}
    # by folder, in folders of bursts
    for path in sorted((tmp_path / "photos").rglob("*.png")):
        folder = tmp_path / "folders" / path.parent.name / path.stem.partition("_")[2]
        folder.mkdir(parents=True, exist_ok=True)
        path.rename(folder / path.name)
    folders = open_dataset("folder", root=tmp_path / "folders").split("all")
    assert set(find_groups(folders, 1)) == set(found)
    for group_by, text in [
        (7, "finds no group in paths such as"),
        ("site", "it has 0 groups"),
        ("(", "is not a regular expression"),
    ]:
        with pytest.raises(ValueError, match=text):
            find_groups(folders, group_by)

    table = tmp_path / "folders" / "labels.csv"
    lines = [
        f"{image_id},{image_id.partition('/')[0]},{group}"
        for image_id, group in zip(folders.ids, find_groups(folders, 1), strict=True)
    ]
    table.write_text("\n".join(["path,label,group", *lines]) + "\n")
    splits = open_dataset("folder", root=table)
    bursts = [read_bursts(list(splits.split(name).ids)) for name in ("train", "validation", "test")]
    assert sum(map(len, bursts)) == 12
    assert "12 groups stay whole" in splits.describe_splits()
    table.unlink()


def test_groups_of_the_user_stay_whole_beside_copies(tmp_path: Path) -> None:
    names = [f"{('cat', 'dog')[n % 2]}/{n}_site{n // 4:02}.png" for n in range(80)]
    save_noise(tmp_path, names, size=(32, 32))
    shutil.copy(tmp_path / "cat" / "0_site00.png", tmp_path / "cat" / "99_site19.png")
    rule = ImageRule(group_by="(site[0-9]+)", group_duplicates=True)
    splits = open_dataset("folder", root=tmp_path, rule=rule)
    sites = [read_bursts(list(splits.split(name).ids)) for name in ("train", "validation", "test")]
    assert sum(map(len, sites)) == len(set().union(*sites)) == 20
    # the two sites of the copy are one group
    assert any({"site00", "site19"} <= each for each in sites)
