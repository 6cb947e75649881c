"""Tar shards give the same samples as files do, at random, from folders, braces and globs."""

import io
import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image

from vit.data.dataset import ImageRule
from vit.data.open import open_dataset


def write_shard(
    path: Path, labels: Sequence[object], *, first: int = 0, suffix: str = "png"
) -> Path:
    """Samples as webdataset writes them; sample n is a picture of the grey n."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path)) as writer:
        for number, label in enumerate(labels, start=first):
            buffer = io.BytesIO()
            Image.new("RGB", (8, 6), (number, number, number)).save(buffer, "PNG")
            writer.write(
                {"__key__": f"s{number:03d}", suffix: buffer.getvalue(), "cls": str(label)}
            )
    return path


def greys(source: object) -> list[int]:
    return [int(np.asarray(source.image(index))[0, 0, 0]) for index in range(len(source))]


def test_samples_are_read_at_random_with_their_labels(tmp_path: Path) -> None:
    write_shard(tmp_path / "a-000.tar", [0, 1, 2, 0])
    write_shard(tmp_path / "a-001.tar", [1, 1, 2], first=4)
    source = open_dataset("webdataset", root=tmp_path).split("all")
    assert greys(source) == list(range(7))
    assert source.labels.tolist() == [0, 1, 2, 0, 1, 1, 2]
    assert source.class_names == ("0", "1", "2")
    assert source.ids[5] == "a-001.tar/s005"
    assert greys(pickle.loads(pickle.dumps(source.subset([6, 2])))) == [6, 2]


def test_folders_hold_splits(tmp_path: Path) -> None:
    write_shard(tmp_path / "train" / "0.tar", [0, 1] * 10)
    write_shard(tmp_path / "val" / "0.tar", [1, 0], first=100)
    assert greys(open_dataset("webdataset", root=tmp_path).split("test")) == [100, 101]
    assert len(open_dataset("webdataset", root=tmp_path).split("validation")) == 2
    (tmp_path / "flat").mkdir()
    write_shard(tmp_path / "flat" / "train-000.tar", [0, 1] * 10)
    write_shard(tmp_path / "flat" / "test-000.tar", [1, 0], first=100)
    assert greys(open_dataset("webdataset", root=tmp_path / "flat").split("test")) == [100, 101]


def test_braces_and_globs_name_shards_in_order(tmp_path: Path) -> None:
    for number in range(3):
        write_shard(tmp_path / f"s-{number:02d}.tar", [0, 1], first=10 * number)
    for pattern, expected in (
        ("s-{00..01}.tar", [0, 1, 10, 11]),
        ("s-*.tar", [0, 1, 10, 11, 20, 21]),
        ("s-{02,00}.tar", [20, 21, 0, 1]),
    ):
        assert (
            greys(open_dataset("webdataset", root=f"{tmp_path}/{pattern}").split("all")) == expected
        )
    with pytest.raises(FileNotFoundError, match="absent-"):
        open_dataset("webdataset", root=f"{tmp_path}/absent-*.tar").split("train")


def test_damaged_shards_are_refused(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.tar", [0, 1, 2])
    whole = shard.read_bytes()
    for cut in (100, 700, 1100, 3000):
        shard.write_bytes(whole[:cut])
        with pytest.raises(
            ValueError,
            match=r"a\.tar (is not a complete tar file|is cut short|holds no images|has no label)",
        ):
            open_dataset("webdataset", root=tmp_path).split("train")
    write_shard(shard, [0, 0, 0])
    with pytest.raises(ValueError, match="fewer than two classes: '0'"):
        open_dataset("webdataset", root=tmp_path).split("train")
    write_shard(shard, ["", "x", "y"])
    with pytest.raises(ValueError, match=r"has no label s000\.cls for the image s000"):
        open_dataset("webdataset", root=tmp_path).split("train")


SETS = [["bee"], ["ant", "cow"], [], ["cow"], ["ant"]] * 3
MARKS = [[name in labels for name in ("ant", "bee", "cow")] for labels in SETS]


def test_several_labels_are_read_from_the_file_of_a_sample(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-0.tar", ["|".join(labels) for labels in SETS])
    rule = ImageRule(task="multilabel")
    images = open_dataset("webdataset", root=tmp_path, rule=rule).split("all")
    assert images.labels.tolist() == MARKS
    assert images.class_names == ("ant", "bee", "cow")
