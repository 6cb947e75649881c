"""The same photographs in every layout of a data set: read alike, and a damaged one is named in
each."""

import csv
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from vit.data.cache import decode_dataset
from vit.data.open import open_dataset
from vit.data.sources.registry import find_kind

datasets = pytest.importorskip("datasets")

CLASSES, EACH = ("china", "flower"), 12
Photos = list[tuple[str, str, bytes]]  # name, class, JPEG


@pytest.fixture(scope="module")
def photos() -> Photos:
    """Parts of scikit-learn's two photographs, of many sizes."""
    found, rng = [], np.random.default_rng(0)
    for label, pixels in zip(CLASSES, load_sample_images().images, strict=True):
        for number in range(EACH):
            height, width = (int(side) for side in rng.integers(40, 90, 2))
            top, left = rng.integers(0, (pixels.shape[0] - height, pixels.shape[1] - width))
            part = Image.fromarray(pixels[top : top + height, left : left + width])
            part.save(buffer := io.BytesIO(), "JPEG", quality=90)
            found.append((f"{label}-{number:02d}.jpg", label, buffer.getvalue()))
    return found


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def write_classes(root: Path, photos: Photos) -> Path:
    for name, label, content in photos:
        write(root / label / name, content)
    return root


def write_nested(root: Path, photos: Photos) -> Path:
    for number, (name, label, content) in enumerate(photos):
        write(root / label / f"of {number % 3}" / "day" / name, content)
    return root


def write_splits(root: Path, photos: Photos) -> Path:
    for number, (name, label, content) in enumerate(photos):
        write(root / ("train", "val", "test", "train")[number % 4] / label / name, content)
    return root


def write_valid(root: Path, photos: Photos) -> Path:
    for number, (name, label, content) in enumerate(photos):
        write(root / ("train", "valid", "train")[number % 3] / label / name, content)
    return root


def write_table(
    root: Path, photos: Photos, *, columns: tuple[str, str], name: str = "labels.csv"
) -> Path:
    for photo, _, content in photos:
        write(root / "images" / photo, content)
    with (root / name).open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["note", *columns])
        table.writerows(["x", f"images/{photo}", label] for photo, label, _ in photos)
    return root


def write_jsonl(root: Path, photos: Photos) -> Path:
    for split, start in (("train", 0), ("test", 1)):
        rows = [{"file_name": name, "label": label} for name, label, _ in photos[start::2]]
        for name, _, content in photos[start::2]:
            write(root / split / name, content)
        write(root / split / "metadata.jsonl", "\n".join(map(json.dumps, rows)).encode())
    return root


def make_rows(photos: Photos) -> "datasets.Dataset":
    rows = {"image": [{"bytes": content, "path": name} for name, _, content in photos]}
    rows["label"] = [CLASSES.index(label) for _, label, _ in photos]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))}
    )
    return datasets.Dataset.from_dict(rows, features=features)


def write_parquet(root: Path, photos: Photos) -> Path:
    root.mkdir()
    make_rows(photos).to_parquet(root / "train-00000.parquet")
    return root


def write_saved(root: Path, photos: Photos) -> Path:
    datasets.DatasetDict(train=make_rows(photos[::2]), test=make_rows(photos[1::2])).save_to_disk(
        str(root)
    )
    return root


def write_shards(root: Path, photos: Photos) -> Path:
    root.mkdir()
    for shard in range(2):
        with tarfile.open(root / f"train-{shard:04d}.tar", "w") as tar:
            for name, label, content in photos[shard::2]:
                for suffix, data in (("jpg", content), ("cls", label.encode())):
                    member = tarfile.TarInfo(f"{Path(name).stem}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return root


LAYOUTS: dict[str, Callable[[Path, Photos], Path]] = {
    "class folders": write_classes,
    "nested folders": write_nested,
    "train, val and test": write_splits,
    "train and valid": write_valid,
    "path and label": lambda root, photos: write_table(root, photos, columns=("path", "label")),
    "filename and class": lambda root, photos: write_table(
        root, photos, columns=("filename", "class")
    ),
    "metadata.csv": lambda root, photos: write_table(
        root, photos, columns=("file_name", "label"), name="metadata.csv"
    ),
    "metadata.jsonl": write_jsonl,
    "Parquet": write_parquet,
    "save_to_disk": write_saved,
    "WebDataset": write_shards,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_photographs_and_names_a_damaged_one(
    layout: str, photos: Photos, tmp_path: Path
) -> None:
    expected = {label: [] for label in CLASSES}
    for _, label, content in photos:
        with Image.open(io.BytesIO(content)) as image:
            expected[label].append(np.asarray(image.convert("RGB")).tobytes())
    root = LAYOUTS[layout](tmp_path / "whole", photos)
    kind = find_kind(root)
    assert kind is not None
    source = open_dataset(kind, root=root, cache_dir=tmp_path / "cache").split("all")
    assert source.class_names == CLASSES
    found = {label: [] for label in CLASSES}
    for index in range(len(source)):
        found[CLASSES[source.labels[index]]].append(np.asarray(source.image(index)).tobytes())
    assert {label: sorted(pixels) for label, pixels in found.items()} == {
        label: sorted(pixels) for label, pixels in expected.items()
    }
    name, label, content = photos[5]
    broken = [*photos[:5], (name, label, content[: len(content) // 2]), *photos[6:]]
    shutil.rmtree(root)
    source = open_dataset(
        kind, root=LAYOUTS[layout](root, broken), cache_dir=tmp_path / "cache"
    ).split("all")
    options = {"size": (16, 16), "cache_dir": tmp_path / "cache", "progress": False}
    decoded = decode_dataset(source, **options)
    assert len(decoded) == 2 * EACH - 1
    assert len(decoded.unreadable) == 1
    with pytest.raises(
        ValueError, match="1 of 24 images can't be read, more than the allowed fraction of 0"
    ):
        decode_dataset(source, **options, max_unreadable_fraction=0.0)
