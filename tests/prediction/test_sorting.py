"""Photos go into a folder for each class; nothing is overwritten, whatever its name."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vit
from vit.bundle import Bundle
from vit.prediction.records import Prediction
from vit.prediction.sorting import PhotoSorter, name_folders

CONFORMAL = {"num_images": 100, "thresholds": {"0.95": 0.4}, "no_likeness": ""}


@pytest.fixture
def sorter(bundle: Bundle, tmp_path: Path) -> PhotoSorter:
    names = tuple(f"class {number}" for number in range(len(bundle.class_names)))
    metadata = {**bundle.metadata, "conformal": CONFORMAL}
    sorted_bundle = replace(bundle, class_names=names, metadata=metadata)
    return PhotoSorter(tmp_path / "sorted", sorted_bundle)


def predict(path: Path, *names: str, p_value: float | None = 0.5) -> Prediction:
    return Prediction(str(path), [], None, list(names), p_value)


def test_folders_have_names_that_no_file_system_refuses() -> None:
    names = ["cat", "../../etc", "Unusual", "CAT", "", "a/b", "a:b", ".", "unsure"]
    folders = name_folders(names)
    assert folders == [
        "cat", "_.._etc", "Unusual-2", "CAT-2", "image", "a_b", "a_b-2", "image-2", "unsure-2"
    ]  # fmt: skip
    assert all(len(Path(folder).parts) == 1 for folder in folders)


def test_a_photo_goes_where_its_answer_says(sorter: PhotoSorter, tmp_path: Path) -> None:
    photo = tmp_path / "a.jpg"
    assert sorter.choose_folders(predict(photo, "class 1")) == ["class 1"]
    assert sorter.choose_folders(predict(photo, "class 1", p_value=None)) == ["class 1"]
    assert sorter.choose_folders(predict(photo, "class 1", "class 0")) == ["unsure"]
    assert sorter.choose_folders(predict(photo)) == ["unsure"]
    assert sorter.choose_folders(predict(photo, "class 1", p_value=0.05)) == ["unusual"]
    assert sorter.choose_folders(predict(photo, "class 1", p_value=0.06)) == ["class 1"]


def test_nothing_is_overwritten(sorter: PhotoSorter, tmp_path: Path) -> None:
    photos = []
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        photos.append(folder / "a.jpg")
        photos[-1].write_bytes(bytes([number]))
    target = tmp_path / "sorted/class 1"
    target.mkdir(parents=True)
    (target / "a.jpg").write_bytes(b"mine")
    (target / "a-2.jpg").symlink_to(tmp_path / "elsewhere")
    # twice: copies of an earlier run are not copied again
    for photo in photos * 2:
        sorter.copy(predict(photo, "class 1"))
    contents = {path.name: path.read_bytes() for path in target.glob("*") if not path.is_symlink()}
    assert contents == {
        "a.jpg": b"mine", "a-3.jpg": b"\0", "a-4.jpg": b"\1", "a-5.jpg": b"\2"
    }  # fmt: skip
    assert not (tmp_path / "elsewhere").exists()
    assert [photo.read_bytes() for photo in photos] == [b"\0", b"\1", b"\2"]


def test_a_program_that_is_killed_leaves_no_half_photo_under_its_name(
    sorter: PhotoSorter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo = tmp_path / "a.jpg"
    photo.write_bytes(b"photo")
    seen: list[list[str]] = []

    def die(source: Path, copy: Path) -> None:
        copy.write_bytes(b"ph")
        seen.append([path.name for path in (tmp_path / "sorted/class 1").glob("[!.]*")])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", die)
        with pytest.raises(KeyboardInterrupt):
            sorter.copy(predict(photo, "class 1"))
    assert seen == [[]]
    sorter.copy(predict(photo, "class 1"))
    (copy,) = (tmp_path / "sorted/class 1").iterdir()
    assert (copy.name, copy.read_bytes()) == ("a.jpg", b"photo")


def test_what_cannot_be_sorted_is_refused(
    sorter: PhotoSorter, bundle: Bundle, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"photos can't be sorted: .* holds no thresholds"):
        PhotoSorter(tmp_path, replace(bundle, metadata={}))
    with pytest.raises(ValueError, match="is inside the photos"):
        sorter.check([tmp_path])
    # of a photo that can't be read, nothing is copied
    sorter.copy(Prediction("gone.jpg", [], error="it is gone"))
    assert not (tmp_path / "sorted").exists()


def test_photos_are_sorted_by_a_trained_model(tiny_bundle: Bundle, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    rng = np.random.default_rng(0)
    for name in ("a.png", "b; rm -rf $HOME.png"):
        pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(photos / name)
    result = vit.predict(tiny_bundle, photos, sort_into=tmp_path / "sorted")
    copies = sorted(os.listdir(tmp_path / "sorted"))
    assert sum(len(os.listdir(tmp_path / "sorted" / name)) for name in copies) == 2
    for prediction in result.predictions:
        assert prediction.p_value is not None
        assert 0 < prediction.p_value <= 1
        assert prediction.prediction_set is not None
