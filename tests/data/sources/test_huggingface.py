"""Parquet files, directories of save_to_disk and names on the Hub, by Hugging Face's own
library."""

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import TINY_RUN, Launcher
from tests.data.conftest import draw_pixels
from vit.data.cache import decode_dataset
from vit.data.dataset import LabelRule
from vit.data.open import RecordedImages, open_dataset, open_for_model
from vit.data.sources.registry import find_kind
from vit.data.splits import SplitRule

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

Rows = dict[str, list[Any]]


def encode(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(draw_pixels(seed)).save(buffer, "PNG")
    return buffer.getvalue()


def make_rows(count: int = 12, *, first: int = 0, **changes: list[Any]) -> Rows:
    """Pictures as the Hub's Parquet files hold them."""
    images = [{"bytes": encode(first + number), "path": f"{number}.png"} for number in range(count)]
    return {"image": images, "label": [number % 3 for number in range(count)], **changes}


def write_parquet(path: Path, rows: Rows, *, names: list[str] | None = None) -> Path:
    """With `names`, the metadata with which the library says what its columns are."""
    table = pa.table(rows)
    if names:
        features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": names}}
        table = table.replace_schema_metadata(
            {"huggingface": json.dumps({"info": {"features": features}})}
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


def save_to_disk(path: Path, **splits: Rows) -> Path:
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bee", "cow"])}
    )
    saved = {
        split: datasets.Dataset.from_dict(rows, features=features) for split, rows in splits.items()
    }
    datasets.DatasetDict(saved).save_to_disk(str(path))
    return path


def assert_pictures(source: Any, first: int = 0) -> None:
    for index in (0, len(source) - 1):
        np.testing.assert_array_equal(np.asarray(source.image(index)), draw_pixels(first + index))


def test_a_parquet_file_is_read_with_the_names_in_its_metadata(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", make_rows(), names=["ant", "bee", "cow"])
    source = open_dataset("huggingface", root=path, cache_dir=tmp_path / "cache").split("all")
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
    images = [encode(number) for number in range(3)]
    path = write_parquet(tmp_path / "x.parquet", {"image": images, "class": labels})
    source = open_dataset("huggingface", root=path, cache_dir=tmp_path / "cache").split("all")
    assert source.class_names == names
    assert [names[label] for label in source.labels] == [str(label) for label in labels]
    assert_pictures(source)


@pytest.mark.parametrize("folder", ["", "data"])
def test_a_folder_of_parquet_files_has_splits(tmp_path: Path, folder: str) -> None:
    root = tmp_path / "set"
    for number in range(2):
        write_parquet(
            root / folder / f"train-0000{number}-of-00002.parquet", make_rows(first=12 * number)
        )
    write_parquet(root / folder / "validation-00000-of-00001.parquet", make_rows(6, first=50))
    dataset = open_dataset(
        "huggingface",
        root=root,
        cache_dir=tmp_path / "cache",
        rule=SplitRule(validation_fraction=0),
    )
    assert [len(dataset.split(split)) for split in ("train", "test")] == [24, 6]
    assert_pictures(dataset.split("test"), first=50)


def test_a_directory_of_save_to_disk_is_read(tmp_path: Path) -> None:
    root = save_to_disk(
        tmp_path / "saved",
        train=make_rows(),
        valid=make_rows(3, first=30),
        test=make_rows(3, first=40),
    )
    dataset = open_dataset("huggingface", root=root, cache_dir=tmp_path / "cache")
    assert [len(dataset.split(split)) for split in ("train", "validation", "test")] == [12, 3, 3]
    assert dataset.split("test").class_names == ("ant", "bee", "cow")
    assert_pictures(dataset.split("validation"), first=30)
    assert dataset.split("test").subset([2, 0]).reader.sizes().tolist() == [
        len(encode(42)),
        len(encode(40)),
    ]
    one = datasets.Dataset.from_dict(make_rows(6))
    one.save_to_disk(str(tmp_path / "one"))
    assert (
        len(open_dataset("huggingface", root=tmp_path / "one", classes=["2", "0"]).split("all"))
        == 4
    )


def test_a_directory_without_splits_or_with_damaged_places_is_one_line(tmp_path: Path) -> None:
    root = save_to_disk(tmp_path / "saved", train=make_rows())
    (path,) = root.rglob("*.arrow")
    content = path.read_bytes()
    # the places of the second and later images, as Arrow stores them
    sizes = [0, *np.cumsum([len(encode(number)) for number in range(12)])]
    places = np.array(sizes, dtype="<i4").tobytes()
    assert content.count(places) == 1
    path.write_bytes(content.replace(places, places[:4] + b"\xff" * 4 + places[8:]))
    with pytest.raises(OSError, match=r"can't be read as a data set: .*offset"):
        open_dataset("huggingface", root=root, cache_dir=tmp_path / "cache").split("all")
    (root / "dataset_dict.json").write_text('{"splits": []}')
    with pytest.raises(OSError, match="can't be read as a data set: it names no splits"):
        open_dataset("huggingface", root=root, cache_dir=tmp_path / "cache").split("all")


def test_splits_without_labels_and_other_splits_are_left_out(tmp_path: Path) -> None:
    root = save_to_disk(
        tmp_path / "saved", train=make_rows(), test=make_rows(3, label=[-1] * 3), extra=make_rows(3)
    )
    dataset = open_dataset("huggingface", root=root, cache_dir=tmp_path / "cache")
    assert dataset.images.own_splits == ["train"]
    assert dataset.split("train").notes == (
        "the split 'test' was left out",
        "the split 'extra' was left out",
    )


def test_a_name_on_the_hub_is_loaded_by_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def load_dataset(*arguments: Any, **options: Any) -> Any:
        asked.append(arguments)
        return datasets.DatasetDict({"train": datasets.Dataset.from_dict(make_rows())})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for root in ("hf:owner/name", "hf:owner/name:small"):
        assert len(open_dataset("huggingface", root=root, cache_dir=tmp_path).split("all")) == 12
        assert find_kind(root) == "huggingface"
    assert asked == [("owner/name", None), ("owner/name", "small")]


def test_the_cache_follows_the_rows(tmp_path: Path) -> None:
    keys, fingerprints = [], []
    for number, rows in enumerate((make_rows(), make_rows(), make_rows(first=1))):
        if number != 1:
            write_parquet(tmp_path / "x.parquet", rows)
        source = open_dataset(
            "huggingface", root=tmp_path / "x.parquet", cache_dir=tmp_path / "cache"
        ).split("all")
        keys.append(source.reader.cache_key())
        decoded = decode_dataset(source, size=(8, 8), cache_dir=tmp_path / "cache", progress=False)
        fingerprints.append(decoded.fingerprint)
    assert keys[0] == keys[1] != keys[2]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_it_is_trained_on_and_evaluated_by_its_path(tmp_path: Path, cli: Launcher) -> None:
    path = write_parquet(tmp_path / "x.parquet", make_rows(60))
    assert find_kind(path) == find_kind(tmp_path) == "huggingface"
    assert len(open_for_model(path, recorded=RecordedImages()).split()) == 60
    data = ["data.name=huggingface", f"data.root={path}", "train.batch_size=16", "train.epochs=1"]
    for pipeline, workers in (("resident", 0), ("workers", 1)):
        more = [f"data.pipeline={pipeline}", f"data.workers={workers}"]
        cli.succeed("train", "digits", *TINY_RUN, *data, *more, "-o", tmp_path / pipeline)
    cli.succeed("evaluate", tmp_path / "resident", "--device", "cpu", "-o", tmp_path / "evaluation")


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            make_rows(3, label=[0.5, 1.0, 2.0]),
            "train row 0: label 0.5 is neither a text nor a whole number",
        ),
        (
            make_rows(3, label=["a", None, "b"]),
            "train row 1: label None is neither a text nor a whole number",
        ),
        (make_rows(3, label=[1, 1, 1]), "names fewer than two classes: '1'"),
        (make_rows(0), "can't be read as a data set: .* no data"),
        (
            {"image": [encode(0)], "text": ["a"]},
            "has no column label or labels or class, only image, text",
        ),
        (
            {"picture": [encode(0)], "label": ["a"]},
            "has no column image or img, only picture, label",
        ),
        ({"image": [1.5, 2.5], "label": ["a", "b"]}, "the column image holds .*, not images"),
    ],
    ids=["float", "null", "one class", "empty", "no label", "no image", "numbers"],
)
def test_a_broken_table_is_one_line(tmp_path: Path, rows: Rows, sentence: str) -> None:
    path = write_parquet(tmp_path / "x.parquet", rows)
    with pytest.raises((ValueError, OSError), match=sentence):
        open_dataset("huggingface", root=path, cache_dir=tmp_path / "cache").split("train")


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-40], lambda content: b"PAR1 no table", lambda content: b""]
)
def test_a_corrupt_file_is_one_line(
    tmp_path: Path, cli: Launcher, damage: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "x.parquet", make_rows())
    path.write_bytes(damage(path.read_bytes()))
    data = ["data.name=huggingface", f"data.root={path}", f"data.cache_dir={tmp_path / 'cache'}"]
    line = cli.fail("train", "digits", *TINY_RUN, *data, "-o", tmp_path / "run")
    assert f"data.root {path} can't be read as a data set: " in line


@pytest.mark.parametrize("root", ["absent", "hf:owner/absent"])
def test_what_is_not_there_is_one_line(
    tmp_path: Path, cli: Launcher, root: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    data = ["data.name=huggingface", f"data.root={root}"]
    assert "can't be read as a data set: " in cli.fail(
        "train", "digits", *TINY_RUN, *data, "-o", tmp_path / "run"
    )


def test_an_image_that_cannot_be_decoded_is_skipped_and_named(tmp_path: Path) -> None:
    images = [{"bytes": encode(number), "path": None} for number in range(12)]
    images[4]["bytes"], images[7]["bytes"] = b"no picture", None
    path = write_parquet(tmp_path / "x.parquet", make_rows(image=images))
    source = open_dataset("huggingface", root=path, cache_dir=tmp_path / "cache").split("all")
    decoded = decode_dataset(
        source, size=(8, 8), cache_dir=tmp_path, max_unreadable_fraction=0.5, progress=False
    )
    assert [name for name, _ in decoded.unreadable] == ["train/00004", "train/00007"]
    assert len(decoded) == 10


def test_without_the_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(
        ValueError, match=r"datasets.*; pip install '\.\[datasets\]' in the clone of vit"
    ):
        open_dataset("huggingface", root=tmp_path)


# sets of labels of the images, in turn
_SETS = [[1], [0, 2], [], [2]]
_NAMED = [[["ant", "bee", "cow"][label] for label in labels] for labels in _SETS]
LISTS: dict[str, tuple[Any, list[Any], list[str]]] = {
    "classes": (datasets.ClassLabel(names=["ant", "bee", "cow"]), _SETS, ["ant", "bee", "cow"]),
    "numbers as names": (datasets.ClassLabel(names=["2", "0", "1"]), _SETS, ["2", "0", "1"]),
    "texts": (datasets.Value("string"), _NAMED, ["ant", "bee", "cow"]),
    "numbers": (datasets.Value("int64"), _SETS, ["0", "1", "2"]),
}


@pytest.mark.parametrize("form", LISTS)
def test_a_list_in_each_row_is_several_labels(tmp_path: Path, form: str) -> None:
    inner, values, names = LISTS[form]
    feature = datasets.Sequence(inner)
    features = datasets.Features({"image": datasets.Image(), "labels": feature})
    rows = {"image": make_rows(16)["image"], "labels": values * 4}
    saved = datasets.Dataset.from_dict(rows, features=features)
    marks = [[label in labels for label in range(3)] for labels in _SETS * 4]

    def read(path: Path, **rule: Any) -> Any:
        opened = open_dataset("huggingface", root=path, cache_dir=tmp_path / "c", **rule)
        return opened.split("all")

    saved.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "parquet").mkdir()
    saved.to_parquet(str(tmp_path / "parquet" / "train-0.parquet"))
    for path in (tmp_path / "saved", tmp_path / "parquet"):
        images = read(path)
        assert images.class_names == tuple(names)
        assert images.labels.tolist() == marks

    with pytest.raises(ValueError, match="is neither a text nor a whole number"):
        read(tmp_path / "saved", labels=LabelRule(task="classes"))
    # a row of 0 and 1 is no list of labels
    if form == "numbers":
        flags = [[int(place in labels) for place in range(3)] for labels in _SETS * 4]
        marked = datasets.Dataset.from_dict({**rows, "labels": flags}, features=features)
        marked.save_to_disk(str(tmp_path / "marked"))
        with pytest.raises(ValueError, match="has a label twice"):
            read(tmp_path / "marked")
