"""Tables of images: CSV and JSON Lines files by their columns, Hugging Face's metadata files by
their folders."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TINY_RUN, Launcher
from vit.data.open import RecordedImages, open_dataset, open_for_model
from vit.data.sources.registry import find_kind
from vit.data.splits import SplitRule

MakeFolder = Callable[..., Path]
NAMES = [f"{number}.png" for number in range(6)]


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def rows_of(names: list[str], **more: str) -> list[str]:
    """JSON lines in which owls and elks take turns."""
    return [
        json.dumps({"file_name": name, "text": "wild", "label": ("owl", "elk")[number % 2], **more})
        for number, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("labels.csv", "path,label"),
        ("labels.csv", "filename,class"),
        ("metadata.csv", "text,file_name,label"),
        ("anything.csv", "class,text,filename"),
    ],
)
def test_columns_are_found_by_name_in_any_order(
    make_folder: MakeFolder, name: str, header: str
) -> None:
    root = make_folder(*NAMES)
    values = {"text": "", "label": "owl", "class": "owl"}
    lines = [",".join(values.get(column, image) for column in header.split(",")) for image in NAMES]
    lines[1] = lines[1].replace("owl", "elk")
    table = write(root / name, header, *lines)
    for place in {table, root if name != "anything.csv" else table}:
        source = open_dataset("folder", root=place).split("all")
        assert (list(source.ids), source.class_names) == (NAMES, ("elk", "owl"))
        assert source.labels.tolist() == [1, 0, 1, 1, 1, 1]
        assert source.image(3).size == (32, 24)


def test_a_column_of_splits_takes_the_usual_names(make_folder: MakeFolder) -> None:
    root = make_folder(*NAMES)
    splits = ["train", "Training", "val", "valid", "test", "testing"]
    lines = [
        f"{name},{split},{'ab'[number % 2]}"
        for number, (name, split) in enumerate(zip(NAMES, splits, strict=True))
    ]
    write(root / "labels.csv", "path,split,label", *lines)
    dataset = open_dataset("folder", root=root)
    assert [list(dataset.split(split).ids) for split in ("train", "validation", "test")] == [
        NAMES[:2],
        NAMES[2:4],
        NAMES[4:],
    ]
    write(
        root / "labels.csv", "path,split,label", *lines[:4]
    )  # without a test split, validation stays what it says
    assert open_dataset("folder", root=root).source.origins.keys() == {"train", "validation"}


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_metadata_files_in_split_folders_are_the_splits(
    make_folder: MakeFolder, suffix: str
) -> None:
    root = make_folder(*[f"{split}/{name}" for split in ("train", "validation") for name in NAMES])
    for split in ("train", "validation"):
        lines = rows_of(NAMES)
        if suffix == "csv":
            lines = [
                "file_name,label",
                *(f"{name},{'elk' if n % 2 else 'owl'}" for n, name in enumerate(NAMES)),
            ]
        write(root / split / f"metadata.{suffix}", *lines)
    dataset = open_dataset("folder", root=root, rule=SplitRule(validation_fraction=0))
    assert list(dataset.split("train").ids) == [f"train/{name}" for name in NAMES]
    assert list(dataset.split("test").ids) == [f"validation/{name}" for name in NAMES]
    assert dataset.split("test").labels.tolist() == [1, 0] * 3
    assert dataset.describe_splits() == ["validation/ is the test split"]
    dataset.split("test").image(5)


def test_one_metadata_file_places_images_by_their_folders(make_folder: MakeFolder) -> None:
    names = [f"{split}/{name}" for split in ("train", "test") for name in NAMES]
    root = make_folder(*names)
    write(root / "metadata.jsonl", *rows_of(names))
    dataset = open_dataset("folder", root=root, rule=SplitRule(validation_fraction=0))
    assert list(dataset.split("train").ids) == names[:6]
    assert list(dataset.split("test").ids) == names[6:]


def test_whole_numbers_are_classes_too(make_folder: MakeFolder) -> None:
    root = make_folder("0.png", "1.png")
    write(
        root / "metadata.jsonl",
        *(json.dumps({"file_name": f"{n}.png", "label": n}) for n in (0, 1)),
    )
    assert open_dataset("folder", root=root).split("all").class_names == ("0", "1")


def test_the_cache_key_follows_the_table_and_its_files(make_folder: MakeFolder) -> None:
    root = make_folder(*NAMES)
    table = write(root / "metadata.jsonl", *rows_of(NAMES))
    before = open_dataset("folder", root=root).split("all").cache_key()
    assert open_dataset("folder", root=table).split("all").cache_key() == before
    write(table, *rows_of(NAMES[::-1]))
    assert open_dataset("folder", root=root).split("all").cache_key() != before


@pytest.mark.parametrize(
    ("table", "content", "sentence"),
    [
        (
            "a.csv",
            "path,name\n0.png,x\n",
            "a.csv names fewer than two classes: 'x'",
        ),
        ("a.csv", "", "a.csv holds no rows"),
        ("a.csv", "path,label\n", "a.csv holds no rows"),
        ("a.csv", "path,label\n0.png,x\n", "a.csv names fewer than two classes: 'x'"),
        (
            "a.csv",
            "path,label\n9.png,x\n",
            "a.csv line 2: 9.png is not a file; correct the path .none is below",
        ),
        (
            "a.csv",
            "path,label,split\n0.png,x,dev\n",
            "a.csv line 2: unknown split 'dev'; known: train, validation, test",
        ),
        (
            "a.csv",
            'path,label\n"0.png,x\n',
            "a.csv line 2: 1 instead of 2 values .0.png,x.; write path,label",
        ),
        (
            "a.csv",
            b"path,label\n\xff\xfe,x\n",
            "a.csv line 2: ÿþ is not a file.*read so: .*Windows-1252",
        ),
        ("a.jsonl", "", "a.jsonl holds no rows"),
        (
            "a.jsonl",
            '{"file_name": "0.png"}',
            "no column is known to hold the classes; its columns are 'file_name'; .*--label-column",
        ),
        (
            "a.jsonl",
            '{"label": "x"}',
            "no column is known to name the images; its columns are 'label'; .*--path-column",
        ),
        ("a.jsonl", "[1]", "a.jsonl line 1 is not a JSON object"),
        ("a.jsonl", '{"file_name": ', "a.jsonl line 1 is not valid JSON"),
        ("a.jsonl", '{"file_name": 7, "label": "x"}', "a.jsonl line 1: 7 is not a file"),
        (
            "a.jsonl",
            '{"path": "0.png", "label": ["x", "y"]}',
            "line 1: x and y are labels; an image has one class: keep one, leave the image out, or",
        ),
        (
            "a.jsonl",
            '{"path": "0.png", "label": 1.5}',
            "line 1: label 1.5 is neither a text nor a whole number",
        ),
        (
            "a.jsonl",
            '{"path": "0.png", "label": null}',
            "line 1: label None is neither a text nor a whole number",
        ),
        ("a.jsonl", '{"path": "0.png", "label": true}', "line 1: label True is neither"),
        ("a.jsonl", '{"path": "0.png", "label": "x", "split": ["train"]}', "line 1: unknown split"),
    ],
)
def test_a_broken_table_is_one_line(
    make_folder: MakeFolder,
    cli: Launcher,
    tmp_path: Path,
    table: str,
    content: str | bytes,
    sentence: str,
) -> None:
    root = make_folder("0.png", "1.png")
    (root / table).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=sentence):
        open_dataset("folder", root=root / table).split("train")
    data = ["data.name=folder", f"data.root={root / table}"]
    assert f"vit: error: {root}" in cli.fail(
        "train", "digits", *TINY_RUN, *data, "-o", tmp_path / "run"
    )


def test_a_split_folder_without_a_metadata_file_is_named(make_folder: MakeFolder) -> None:
    root = make_folder("train/0.png", "test/0.png")
    write(root / "train" / "metadata.jsonl", *rows_of(["0.png"]))
    with pytest.raises(
        ValueError, match=r"test has no metadata.csv or metadata.jsonl, which other splits"
    ):
        open_dataset("folder", root=root).split("train")


def test_a_table_is_evaluated_by_its_path(make_folder: MakeFolder) -> None:
    root = make_folder(*NAMES)
    table = write(
        root / "some.csv", "path,label", *(f"{name},{n % 2}" for n, name in enumerate(NAMES))
    )
    assert find_kind(table) == find_kind(root) == "folder"
    assert find_kind(root / "absent.csv") is None
    assert len(open_for_model(table, recorded=RecordedImages()).split()) == 6
