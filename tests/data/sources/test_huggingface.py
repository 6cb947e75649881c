"""Parquet files and names on the Hub, by Hugging Face's own library."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import TINY_RUN, Launcher
from tests.data.conftest import draw_pixels
from vit.data.cache import decode_dataset
from vit.data.dataset import ImageRule
from vit.data.open import find_kind, open_dataset, open_for_model
from vit.data.preprocess import Preprocess
from vit.data.splits import DatasetSplits

datasets = pytest.importorskip("datasets")

NAMES = ["ant", "bee", "cow"]
CLASSES = datasets.ClassLabel(names=NAMES)


def encode(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(draw_pixels(seed)).save(buffer, "PNG")
    return buffer.getvalue()


def make_table(count: int = 12, *, first: int = 0, kind: Any = CLASSES, **columns: Any) -> Any:
    """Pictures as the Hub's Parquet files hold them, with labels of a kind."""
    images = [{"bytes": encode(first + number), "path": f"{number}.png"} for number in range(count)]
    rows = {"image": images, "label": [number % 3 for number in range(count)], **columns}
    features = datasets.Features({"image": datasets.Image(), "label": kind})
    return datasets.Dataset.from_dict(rows, features=features)


def write_parquet(path: Path, table: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_parquet(str(path))
    return path


def open_place(root: object, **options: Any) -> DatasetSplits:
    return open_dataset("huggingface", root=root, **options)


def assert_pictures(source: Any, first: int = 0) -> None:
    for index in (0, len(source) - 1):
        np.testing.assert_array_equal(np.asarray(source.image(index)), draw_pixels(first + index))


@pytest.fixture(autouse=True)
def own_cache(empty_cache: Path) -> None:
    """The library's copies are made anew."""


def test_a_parquet_file_is_read_with_the_names_in_its_metadata(tmp_path: Path) -> None:
    source = open_place(write_parquet(tmp_path / "x.parquet", make_table())).split("all")
    assert source.class_names == ("ant", "bee", "cow")
    assert source.labels.tolist() == [0, 1, 2] * 4
    assert source.ids[3] == "train/00003"
    assert_pictures(source)
    assert_pictures(pickle.loads(pickle.dumps(source.subset([5, 6]))), first=5)


@pytest.mark.parametrize(
    ("labels", "names"),
    [(["owl", "elk", "ant"], ("ant", "elk", "owl")), ([10, 9, 2], ("2", "9", "10"))],
)
def test_labels_without_metadata_name_themselves(
    tmp_path: Path, labels: list[Any], names: tuple[str, ...]
) -> None:
    images = [{"bytes": encode(number), "path": None} for number in range(3)]
    table = datasets.Dataset.from_dict({"img": images, "class": labels})
    source = open_place(write_parquet(tmp_path / "x.parquet", table)).split("all")
    assert source.class_names == names
    assert [names[label] for label in source.labels] == [str(label) for label in labels]
    assert_pictures(source)


@pytest.mark.parametrize("folder", ["", "data"])
def test_a_folder_of_parquet_files_has_splits(tmp_path: Path, folder: str) -> None:
    root = tmp_path / "set"
    for number in range(2):
        name = f"train-0000{number}-of-00002.parquet"
        write_parquet(root / folder / name, make_table(first=12 * number))
    path = root / folder / "validation-00000-of-00001.parquet"
    write_parquet(path, make_table(6, first=50))
    assert find_kind(root) == find_kind(path) == "huggingface"
    assert len(open_for_model(root, recorded={}).split()) == 6
    dataset = open_place(root, rule=ImageRule(validation_fraction=0))
    assert [len(dataset.split(split)) for split in ("train", "test")] == [24, 6]
    assert_pictures(dataset.split("test"), first=50)


def test_splits_without_labels_are_left_out(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", make_table())
    # the Hub hides the labels of test images
    hidden = make_table(3, kind=datasets.Value("int64"), label=[-1] * 3)
    write_parquet(tmp_path / "test.parquet", hidden)
    source = open_place(tmp_path, rule=ImageRule(classes=["cow", "ant"])).split("all")
    assert len(source) == 8
    assert "the split 'test' was left out" in source.notes


def test_a_name_on_the_hub_is_loaded_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*arguments: Any, **options: Any) -> Any:
        asked.append(arguments)
        return datasets.DatasetDict({"train": make_table()})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for root in ("hf:owner/name", "hf:owner/name:small"):
        assert len(open_place(root).split("all")) == 12
        assert find_kind(root) == "huggingface"
    assert asked == [("owner/name", None), ("owner/name", "small")]


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"label": [0.5, 1.0, 2.0]}, "labels of dataset are 0.5, 1.0, 2.0, not"),
        ({"label": [1, 1, 1]}, "fewer than two classes: '1'"),
        ({"text": ["a"] * 3}, "train has image, text; call one of them label"),
        ({"picture": ["a"] * 3, "label": ["a"] * 3}, "call one of them image or img"),
        ({"image": [1.5] * 3, "label": ["a"] * 3}, "the column image is .*, no image"),
        # a row of 0 and 1 is no list of labels
        ({"label": [[0, 1, 1]] * 3}, "has a label twice"),
    ],
)
def test_a_broken_table_is_one_line(tmp_path: Path, columns: Any, sentence: str) -> None:
    if "picture" not in columns:
        images = [{"bytes": encode(number), "path": None} for number in range(3)]
        columns = {"image": images, **columns}
    path = write_parquet(tmp_path / "x.parquet", datasets.Dataset.from_dict(columns))
    with pytest.raises((ValueError, OSError), match=sentence):
        open_place(path)


@pytest.mark.parametrize("root", ["no-table.parquet", "hf:owner/absent"])
def test_a_corrupt_or_missing_file_is_one_line(
    tmp_path: Path, cli: Launcher, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no-table.parquet").write_bytes(b"PAR1 no table")
    data = ["data.name=huggingface", f"data.root={root}"]
    line = cli.fail("train", "digits", *TINY_RUN, *data, "-o", tmp_path / "run")
    assert "can't be read as a data set: " in line


def test_an_image_that_cannot_be_decoded_is_skipped_and_named(tmp_path: Path) -> None:
    images = [{"bytes": encode(number), "path": None} for number in range(12)]
    images[4]["bytes"] = b"no picture"
    # rows of strangers name no files
    images[7] = {"bytes": None, "path": str(write_parquet(tmp_path / "y.parquet", make_table()))}
    path = write_parquet(tmp_path / "x.parquet", make_table(image=images))
    decoded = decode_dataset(
        open_place(path).split("all"),
        Preprocess((8, 8)),
        cache_dir=tmp_path,
        max_unreadable_fraction=0.5,
    )
    assert [name for name, _ in decoded.unreadable] == ["train/00004", "train/00007"]
    assert len(decoded) == 10


def test_without_the_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[datasets\]' in the clone of vit"):
        open_place(tmp_path)


@pytest.mark.parametrize(
    ("inner", "values", "names"),
    [
        (CLASSES, [[1], [0, 2], [], [2]], NAMES),
        (datasets.Value("string"), [["bee"], ["ant", "cow"], [], ["cow"]], NAMES),
        (datasets.Value("int64"), [[1], [0, 2], [], [2]], ["0", "1", "2"]),
    ],
)
def test_a_list_in_each_row_is_several_labels(
    tmp_path: Path, inner: Any, values: list[Any], names: list[str]
) -> None:
    table = make_table(kind=datasets.Sequence(inner), label=values * 3)
    path = write_parquet(tmp_path / "x.parquet", table)
    images = open_place(path).split("all")
    assert images.class_names == tuple(names)
    marks = [[label in labels for label in range(3)] for labels in [[1], [0, 2], [], [2]] * 3]
    assert images.labels.tolist() == marks
