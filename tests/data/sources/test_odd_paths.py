"""Every kind of place is read whatever characters are in its path."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from vit.data.inputs import list_inputs
from vit.data.open import open_dataset, require_kind

NAMES = ["photos #2", "a:b", "it's", 'a "b"', "a[1] {x}", "100 %", "a,b; c|d", "größe"]


def save_image(path: Path, level: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (9, 9), (level, 0, 0)).save(path)


def make_folder(root: Path) -> Path:
    for number in range(6):
        name = ("cat #1", "dog: 'b'")[number % 2]
        save_image(root / name / f"photo #{number}.png", number)
    return root


def make_table(root: Path) -> Path:
    lines = ["path,label"]
    for number in range(6):
        save_image(root / f"photo #{number}: a.png", number)
        lines.append(f"photo #{number}: a.png,{('cat', 'dog')[number % 2]}")
    (root / "labels #1.csv").write_text("\n".join(lines))
    return root / "labels #1.csv"


def make_shards(root: Path) -> Path:
    root.mkdir(parents=True)
    with tarfile.open(root / "train-0.tar", "w") as tar:
        for number in range(6):
            file = io.BytesIO()
            Image.new("RGB", (9, 9), (number, 0, 0)).save(file, "png")
            for suffix, content in (("png", file.getvalue()), ("cls", b"%d" % (number % 2))):
                member = tarfile.TarInfo(f"{number}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return root


def make_parquet(root: Path) -> Path:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("datasets")
    root.mkdir(parents=True)
    images = []
    for number in range(6):
        file = io.BytesIO()
        Image.new("RGB", (9, 9), (number, 0, 0)).save(file, "png")
        images.append({"bytes": file.getvalue(), "path": None})
    table = pyarrow.table({"image": images, "label": [f"{number % 2}" for number in range(6)]})
    parquet.write_table(table, root / "train.parquet")
    return root


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [make_folder, make_table, make_shards, make_parquet])
def test_a_place_of_any_name_is_read(
    name: str, make: Callable[[Path], Path], tmp_path: Path, vit_cache: Path
) -> None:
    place = make(tmp_path / name)
    splits = open_dataset(require_kind(place), root=str(place))
    dataset = splits.split("all")
    assert sorted(dataset.image(index).getpixel((0, 0))[0] for index in range(6)) == [*range(6)]
    assert dataset.class_counts.tolist() == [3, 3]
    if make in (make_folder, make_table):
        assert len(list(list_inputs(place))) == 6
