"""Prediction reads what training reads, with or without labels: the same pixels from every form."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.object_storage import Bucket, serve_files, serve_s3
from vit.data.images import list_images, read_image
from vit.data.inputs import LazyImage, is_input, list_inputs
from vit.data.open import open_dataset
from vit.prediction.image_predictor import _open_image

_COUNT = 5


def grey(number: int) -> Image.Image:
    return Image.new("RGB", (8, 6), (number * 40,) * 3)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Grey photos 0 to 4; the third is broken."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(_COUNT):
        grey(number).save(folder / f"{number}.png")
    (folder / "2.png").write_bytes(b"no image")
    return folder


def read(images: Any) -> list[tuple[str, int | None]]:
    """The name and the grey of each image; None for one that can't be read."""
    found = []
    for name, image in list_inputs(images):
        try:
            if isinstance(image, str):
                image = read_image(Path(image))
            pixels = _open_image(name, image)
            found.append((name, round(np.asarray(pixels).mean() / 40)))
        except (ValueError, OSError):
            found.append((name, None))
    return found


def write_table(photos: Path, suffix: str, labels: str) -> Path:
    rows = [(f"{number}.png", "cat") for number in (*range(_COUNT), 9)]
    path = photos / f"table{suffix}"
    if suffix == ".jsonl":
        lines = [{"file_name": name, **({labels: label} if labels else {})} for name, label in rows]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    else:
        sign = ";" if suffix == ".csv" else "\t"
        lines = [("image", labels), *rows]  # type: ignore[list-item]
        path.write_text("".join(f"{sign.join(row[: 1 + bool(labels)])}\n" for row in lines))
    return path


def write_shard(photos: Path, *, labels: bool) -> Path:
    path = photos / "shard-0.tar"
    with tarfile.open(path, "w") as tar:
        for photo in sorted(photos.glob("*.png")):
            tar.add(photo, photo.name)
            if labels:
                info = tarfile.TarInfo(f"{photo.stem}.cls")
                info.size = 1
                tar.addfile(info, io.BytesIO(b"1"))
    return path


def write_parquet(photos: Path, column: str = "image") -> Path:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    content = [photo.read_bytes() for photo in sorted(photos.glob("*.png"))]
    path = photos / "rows.parquet"
    pq.write_table(pa.table({column: [{"bytes": each, "path": None} for each in content]}), path)
    return path


EXPECTED = [0, 1, None, 3, 4]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".tsv"])
@pytest.mark.parametrize("labels", ["label", ""])
def test_tables_with_and_without_labels(photos: Path, suffix: str, labels: str) -> None:
    table = write_table(photos, suffix, labels)
    found = read(table)
    assert [grey for _, grey in found] == [*EXPECTED, None]
    assert [name for name, _ in found[:_COUNT]] == [
        str(photos / f"{number}.png") for number in range(_COUNT)
    ]


def test_a_list_of_paths_and_a_table_without_images(photos: Path) -> None:
    listed = photos / "list.txt"
    listed.write_text("".join(f"{number}.png\n" for number in range(_COUNT)))
    assert [grey for _, grey in read(listed)] == EXPECTED
    other = photos / "numbers.csv"
    other.write_text("height,width\n100,200\n300,400\n")
    with pytest.raises(ValueError, match="has no column that names the images"):
        read(other)


@pytest.mark.parametrize("labels", [True, False])
def test_shards_with_and_without_labels(photos: Path, labels: bool, tmp_path: Path) -> None:
    shard = write_shard(photos, labels=labels)
    expected = [(f"shard-0.tar/{number}", grey) for number, grey in enumerate(EXPECTED)]
    assert read(shard) == expected
    assert read(str(photos / "shard-{0..0}.tar")) == expected
    # a folder of images and shards is one of images
    assert len(read(photos)) == _COUNT
    for photo in photos.glob("*.png"):
        photo.unlink()
    assert read(photos) == expected
    assert read([photos, tmp_path / "nothing"]) == [*expected, (str(tmp_path / "nothing"), None)]


def test_parquet_without_labels(photos: Path) -> None:
    pytest.importorskip("datasets")
    path = write_parquet(photos)
    expected = [(f"train/{number:05d}", grey) for number, grey in enumerate(EXPECTED)]
    assert read(path) == expected
    for photo in photos.glob("*.png"):
        photo.unlink()
    assert read(photos) == expected
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(OSError, match=r"rows.parquet can't be read as a data set: "):
        read(path)


def test_parquet_that_holds_no_images(photos: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(ValueError, match="has no column image or img, only picture"):
        read(write_parquet(photos, "picture"))


def test_named_sets_addresses_and_memory(photos: Path) -> None:
    found = list_inputs("digits")
    _, image = next(found)
    assert isinstance(image, LazyImage)
    assert image.load().size == (8, 8)
    assert 1 + sum(1 for _ in found) == 1797
    assert is_input("digits")
    assert not is_input("digit")
    assert read([grey(3), str(photos / "1.png"), np.asarray(grey(4))]) == [
        ("image 0", 3), (str(photos / "1.png"), 1), ("image 2", 4),
    ]  # fmt: skip
    shard = write_shard(photos, labels=False)
    with serve_files(photos) as server:
        url = server.url
        found_all = read([f"{url}/3.png", f"{url}/9.png", f"{url}/{shard.name}"])
    assert [each for _, each in found_all] == [3, None, *EXPECTED]


@pytest.mark.extended
def test_buckets(photos: Path) -> None:
    with serve_s3() as client:
        bucket = Bucket("photos", client)
        for photo in photos.glob("*.png"):
            bucket.put(f"photos/a/{photo.name}", photo)
        bucket.put("shards/0.tar", write_shard(photos, labels=False))
        for folder in ("photos", "shards"):
            assert [grey for _, grey in read(f"{bucket.url}/{folder}")] == EXPECTED
        assert read(f"{bucket.url}/photos/a/3.png") == [(f"{bucket.url}/photos/a/3.png", 3)]
        for place in (f"{bucket.url}/none/", "s3://no-such-bucket/photos/"):
            with pytest.raises(OSError, match=r"check the address|it is not there"):
                read(place)


@pytest.mark.parametrize("name", ["@eaDir", ".thumbnails", "__MACOSX", "#recycle"])
def test_folders_of_systems_are_left_out_as_in_training(tmp_path: Path, name: str) -> None:
    for place in ("cat", "dog", name, f"cat/{name}"):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(folder / "photo.png")
    trained_on = open_dataset("folder", root=tmp_path).split("all").ids
    listed = [str(Path(name).relative_to(tmp_path)) for name, _ in list_inputs(tmp_path)]
    assert listed == list(trained_on) == ["cat/photo.png", "dog/photo.png"]
    assert [Path(path).name for path in list_images([tmp_path / "cat"])] == ["photo.png"]
