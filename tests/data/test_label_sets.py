"""Several labels an image: recognised in tables and in Python's objects, and divided into splits."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vit.data.dataset import ImageDataset, LabelRule
from vit.data.label_sets import number_label_sets
from vit.data.open import open_dataset
from vit.data.sources.python_objects import find_python_objects
from vit.data.splits import DatasetSplits, SplitRule
from vit.data.statistics import choose_class_balance, compute_class_weights

NUM_IMAGES = 60
NAMES = ("bird", "cat", "dog")
_SETS: list[list[str]] = [["cat"], ["dog"], ["cat", "dog"], [], ["bird", "cat"]]
SETS = [_SETS[index % len(_SETS)] for index in range(NUM_IMAGES)]
MARKS = np.array([[name in labels for name in NAMES] for labels in SETS])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for index in range(NUM_IMAGES):
        pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"{index:02}.png")
    return root


def open_table(folder: Path, text: str, *, task: str | None = None, **rule: Any) -> DatasetSplits:
    (folder / "labels.csv").write_text(text)
    return open_dataset("folder", root=folder, labels=LabelRule(task=task), rule=SplitRule(**rule))


def join_rows(rows: list[str], header: str = "path,labels") -> str:
    return "\n".join([header, *rows, ""])


def read_marks(splits: DatasetSplits) -> tuple[tuple[str, ...], np.ndarray]:
    everything = splits.split("all")
    order = np.argsort(everything.ids)
    return everything.class_names, everything.labels[order]


FORMS: dict[str, Callable[[], str]] = {
    "bars": lambda: join_rows([f"{i:02}.png,{'|'.join(x)}" for i, x in enumerate(SETS)]),
    "semicolons": lambda: join_rows([f"{i:02}.png,{'; '.join(x)}" for i, x in enumerate(SETS)]),
    "quoted commas": lambda: join_rows(
        [f'{i:02}.png,"{", ".join(x)}"' for i, x in enumerate(SETS)]
    ),
    "lists": lambda: join_rows([f'{i:02}.png,"{x}"' for i, x in enumerate(SETS)]),
    "columns": lambda: join_rows(
        [f"{i:02}.png," + ",".join(str(int(m)) for m in row) for i, row in enumerate(MARKS)],
        header="filename, bird, cat, dog",
    ),
    "a row a label": lambda: join_rows(
        [f"{i:02}.png,{name}" for i, labels in enumerate(SETS) for name in labels or [""]]
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_table_of_several_labels_is_recognised(folder: Path, form: str) -> None:
    splits = open_table(folder, FORMS[form]())
    names, marks = read_marks(splits)
    assert names == NAMES
    assert (marks == MARKS).all()
    assert "several labels an image (" in "; ".join(splits.source.guesses)


def test_the_tables_of_other_programs_are_read_together(folder: Path, tmp_path: Path) -> None:
    """Roboflow has a table in each split; LightlyTrain has a table beside folders of classes."""
    places = {"train": (0, 40), "valid": (40, 50), "test": (50, 60)}
    for split, (start, end) in places.items():
        own = tmp_path / "roboflow" / split
        own.mkdir(parents=True)
        rows = ["filename, bird, cat, dog"]
        for index in range(start, end):
            shutil.copy(folder / f"{index:02}.png", own)
            rows.append(", ".join([f"{index:02}.png", *map(str, MARKS[index].astype(int))]))
        (own / "_classes.csv").write_text("\n".join(rows))
    splits = open_dataset("folder", root=tmp_path / "roboflow")
    assert splits.split("all").class_names == NAMES
    for split, (start, end) in zip(("train", "validation", "test"), places.values(), strict=True):
        part = splits.split(split)
        assert (part.labels[np.argsort(part.ids)] == MARKS[start:end]).all()

    for split, (start, end) in {"train": (0, 45), "val": (45, 60)}.items():
        rows = ["image_path,label"]
        for index in range(start, end):
            labels = SETS[index] or ["cat"]
            own = tmp_path / "lightly" / split / labels[0]
            own.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / f"{index:02}.png", own)
            rows.append(f'{split}/{labels[0]}/{index:02}.png,"{",".join(labels)}"')
        (tmp_path / "lightly" / f"{split}.csv").write_text("\n".join(rows))
    rule = LabelRule(task="multilabel")
    splits = open_dataset("folder", root=tmp_path / "lightly", labels=rule)
    assert splits.split("all").class_counts.tolist() == [12, 48, 24]
    assert sum(len(splits.split(name)) for name in ("train", "validation", "test")) == NUM_IMAGES
    # without a word, the folders are the classes, and the user is told
    images = open_dataset("folder", root=tmp_path / "lightly").split("all")
    assert not images.is_multilabel
    assert "train.csv, val.csv in lightly/ is not read" in images.notes[0]


def test_json_lines_with_lists_are_recognised(folder: Path) -> None:
    lines = [
        json.dumps({"path": f"{index:02}.png", "labels": labels})
        for index, labels in enumerate(SETS)
    ]
    table = folder / "lists.jsonl"
    table.write_text("\n".join(lines))
    names, marks = read_marks(open_dataset("folder", root=table))
    assert names == NAMES
    assert (marks == MARKS).all()


def test_a_few_mistakes_in_a_table_of_classes_are_no_labels(folder: Path) -> None:
    rows = [f"{i:02}.png,{'ab'[i % 2]}" for i in range(NUM_IMAGES)]
    joined = [*rows[:-1], "59.png,a|b"]
    with pytest.raises(ValueError, match=r"such as 'a\|b'.*data\.task=multilabel"):
        open_table(folder, join_rows(joined)).split("train")
    twice = join_rows([*rows, "00.png,b"])
    with pytest.raises(ValueError, match=r"keep one label for each image, or set data\.task=multi"):
        open_table(folder, twice).split("train")
    # as the user says
    assert open_table(folder, join_rows(joined), task="classes").split("all").class_names == (
        "a", "a|b", "b",
    )  # fmt: skip
    names, marks = read_marks(open_table(folder, join_rows(joined), task="multilabel"))
    assert names == ("a", "b")
    assert marks[-1].tolist() == [True, True]
    assert read_marks(open_table(folder, twice, task="multilabel"))[1][0].tolist() == [True, True]
    assert not open_table(folder, join_rows(rows)).split("all").is_multilabel


def test_a_class_in_brackets_is_a_class(folder: Path) -> None:
    for name in ("(other)", "[other]"):
        rows = [f"{i:02}.png,{'ab'[i % 2] if i % 4 else name}" for i in range(NUM_IMAGES)]
        splits = open_table(folder, join_rows(rows), task="classes")
        assert not splits.split("all").is_multilabel
    rows = [f"{i:02}.png,{'ab'[i % 2] if i % 4 else '(other)'}" for i in range(NUM_IMAGES)]
    assert not open_table(folder, join_rows(rows)).split("all").is_multilabel


def test_splits_are_stratified_over_label_sets_and_keep_groups(folder: Path) -> None:
    splits = open_table(folder, FORMS["bars"](), test_fraction=0.2, validation_fraction=0.25)
    # 8, 2 and 2 of the 12 images of each set
    for name, count in (("train", 8), ("validation", 2), ("test", 2)):
        assert splits.split(name).class_counts.tolist() == [count, 3 * count, 2 * count]
    assert "bird 8/2/2, cat 24/6/6, dog 16/4/4" in splits.describe_classes()
    assert "60 images with 3 labels" in splits.describe_files()

    rows = [f"{i:02}.png,{'|'.join(x)},{i // 4}" for i, x in enumerate(SETS)]
    splits = open_table(folder, join_rows(rows, header="path,labels,group"))
    parts = [splits.split(name) for name in ("train", "validation", "test")]
    groups = [set(part.groups or ()) for part in parts]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 15
    assert all(part.labels.any(axis=0).all() for part in parts)


def test_rare_sets_count_as_their_rarest_label() -> None:
    labels = np.zeros((40, 3), dtype=bool)
    labels[:20, 0] = True
    labels[20:35, 1] = True
    labels[35:, 2] = True
    labels[35, 0] = labels[36, 1] = True  # two sets of one image, whose rarest label is the third
    numbers = number_label_sets(labels)
    assert len(set(numbers[35:].tolist())) == 1
    assert sorted(np.bincount(numbers).tolist()) == [5, 15, 20]


def test_fingerprints_tell_labels_from_classes(folder: Path) -> None:
    several = open_table(folder, FORMS["bars"]()).split("all")
    others = ImageDataset(
        name=several.name,
        class_names=several.class_names,
        labels=several.labels ^ np.eye(len(several), 3, dtype=bool),
        ids=several.ids,
        reader=several.reader,
    )
    assert len({several.fingerprint, others.fingerprint}) == 2
    kept = several.keep_classes(["cat", "bird"])
    assert kept.class_names == ("bird", "cat")
    assert (kept.labels == several.labels[:, :2]).all()


def test_weights_of_labels_are_the_ratio_of_images_without_them() -> None:
    labels = np.zeros((10, 3), dtype=bool)
    labels[:2, 0] = True
    labels[:, 1] = True
    assert compute_class_weights(labels, 3).tolist() == [4.0, 1.0, 1.0]
    assert choose_class_balance(labels[:, :2], wanted="auto")[0] == "none"


PIXELS = np.random.default_rng(0).integers(0, 256, (NUM_IMAGES, 8, 8, 3), dtype=np.uint8)
# labels, names of the classes → names that are expected
PYTHON_FORMS: dict[str, tuple[Any, tuple[str, ...] | None]] = {
    "an array of bool": (MARKS, NAMES),
    "a tensor": (torch.from_numpy(MARKS).float(), NAMES),
    "rows": (MARKS.astype(int).tolist(), NAMES),
    "lists of names": (SETS, None),
    "sets of names": ([set(labels) for labels in SETS], None),
    "lists of numbers": ([np.flatnonzero(row).tolist() for row in MARKS], NAMES),
}


@pytest.mark.parametrize("form", PYTHON_FORMS)
def test_several_labels_from_python(form: str) -> None:
    labels, names = PYTHON_FORMS[form]
    for dataset in ((PIXELS, labels), list(zip(PIXELS, labels, strict=True))):
        found = find_python_objects(dataset, names).load("train")
        assert found.class_names == NAMES
        assert (found.labels == MARKS).all()


def test_one_hot_rows_and_names_stay_classes() -> None:
    one_hot = np.eye(3)[np.arange(NUM_IMAGES) % 3]
    for labels in (one_hot, one_hot.argmax(axis=1), [NAMES[i % 3] for i in range(NUM_IMAGES)]):
        assert not find_python_objects((PIXELS, labels), None).load("train").is_multilabel
    found = find_python_objects((PIXELS, one_hot), None, task="multilabel").load("train")
    assert (found.labels == one_hot).all()
    with pytest.raises(ValueError, match="not several an image: pass rows of 0 and 1, or lists"):
        find_python_objects((PIXELS, ["a", "b"] * 30), None, task="multilabel")
    with pytest.raises(ValueError, match="the label 5 of dataset is not one of 3 names"):
        find_python_objects((PIXELS, [[5], [1, 2]] * 30), NAMES)


def test_a_rare_label_and_groups_are_in_every_split(folder: Path) -> None:
    rows = []
    for index, labels in enumerate(SETS):
        # five images have a sixth label, two of them in one group
        names = [*labels, "rare"] if index in (3, 4, 20, 33, 51) else labels
        rows.append(f"{index:02}.png,{'|'.join(names)},{index // 2}")
    header = "path,labels,group"
    for columns in (2, 3):
        table = join_rows(
            [",".join(row.split(",")[:columns]) for row in rows],
            header=",".join(header.split(",")[:columns]),
        )
        splits = open_table(folder, table)
        parts = [splits.split(name) for name in ("train", "validation", "test")]
        assert all(part.labels[:, part.class_names.index("rare")].any() for part in parts)
        if columns == 3:
            groups = [set(part.groups or ()) for part in parts]
            assert sum(map(len, groups)) == len(set.union(*groups)) == 30


def write_rows(labels: Sequence[str]) -> str:
    return join_rows([f'{i:02}.png,"{labels[i % len(labels)]}"' for i in range(NUM_IMAGES)])


def write_flags(values: Sequence[Sequence[Any]], names: str = "cat,dog,bird") -> str:
    rows = [f"{i:02}.png,{','.join(map(str, values[i % len(values)]))}" for i in range(NUM_IMAGES)]
    return join_rows(rows, header=f"path,{names}")


def write_lines(labels: Sequence[Any]) -> str:
    lines = [
        json.dumps({"path": f"{i:02}.png", "label": labels[i % len(labels)]})
        for i in range(NUM_IMAGES)
    ]
    return "\n".join(lines)


_MANY = [f"label {number}" for number in range(5000)]
# the table, the task that the user names, and the expected names of the labels, number of images
# with each, or message; a second message is a note
BAD: dict[str, tuple[str, str | None, Any, str]] = {
    "unknown separator": (
        write_rows(["cat", "dog", "cat:dog"]), None, r"such as 'cat:dog'; keep one label, .*task=", "",
    ),
    "unknown separator, several": (
        write_rows(["cat", "dog", "cat:dog"]), "multilabel", {"cat": 40, "dog": 40}, "",
    ),
    "spaces between tags": (
        write_rows(["haze cloudy", "haze water", "cloudy water", "haze cloudy water"]), "multilabel",
        {"cloudy": 45, "haze": 45, "water": 45}, "",
    ),
    "mixed separators": (
        write_rows(["cat|dog", "dog;cat", "bird", "cat, bird", "cat"]), None,
        {"bird": 24, "cat": 48, "dog": 24}, "",
    ),
    "a class with a sign": (
        write_rows(["AC/DC", "R&B", "rock, hard"]), None,
        {"AC/DC": 20, "R&B": 20, "rock, hard": 20}, "",
    ),
    "ranges": (write_rows(["3", "5", "3-5"]), None, {"3": 20, "5": 20, "3-5": 20}, "in one"),
    "one label alone": (
        write_rows(["cat", ""]), "multilabel", r"has the label 'cat' alone; give the images", "",
    ),
    "one joined class": (
        write_rows(["a|b", "c", "d"]), None, {"a|b": 20, "c": 20, "d": 20},
        r"1 classes hold '\|', such as 'a\|b': if these are several labels, data.task=multilabel",
    ),
    "5,000 labels": (
        write_lines([_MANY[i * 100 : i * 100 + 200] for i in range(49)]), None, 5000, "",
    ),
    "numbers": (write_rows(["1|2", "2", "10|2", "1"]), None, {"1": 30, "2": 45, "10": 15}, ""),
    "NaN in a list": (write_lines([["a"], ["a", "b"], float("nan")]), None, "nan is not a list", ""),
    "nan as text": (
        write_rows(["a|b", "a", "nan"]), None, {"a": 40, "b": 20, "nan": 20},
        r"look missing are labels of their own: 'nan' 20; leave the value empty",
    ),
    "empty cells": (write_rows(["a|b", "a", "", "  "]), None, {"a": 30, "b": 15}, ""),
    "a label twice": (write_rows(["a|b|a", "b|b", "a"]), None, {"a": 40, "b": 40}, ""),
    "separator at the end": (write_rows(["a|", "|b", "a||b"]), None, {"a": 40, "b": 40}, ""),
    "a label named like a separator": (
        write_lines([["|"], ["a", "|"], ["a"]]), None, {"a": 40, "|": 40}, "",
    ),
    "2 among 0 and 1": (
        write_flags([(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 2)]), None,
        r"'bird' holds 0 and 1, and '2' in line 5 and 14 more; write 0 or 1, or remove", "",
    ),
    "-1 among 0 and 1": (
        write_flags([(-1, 1, 1), (1, 0, 1), (1, 1, 0), (0, 0, 0)]), None, "'cat' .* '-1' in line 2", "",
    ),
    "nothing among 0 and 1": (
        write_flags([("", 1, 1), (1, 0, 1), (1, 1, 0), (0, 0, 0)]), None, "'cat' .* '' in line 2", "",
    ),
    "yes and true": (
        write_flags([("yes", "TRUE", "no"), ("no", "False", "y"), ("Yes", "true", "y")]), None,
        {"bird": 40, "cat": 40, "dog": 40}, "",
    ),
    "a name in two encodings": (
        write_rows(["caf\u00e9|a", "cafe\u0301|b", "a"]), None, "in how their characters are encoded", "",
    ),
    "small and large letters": (
        write_rows(["Cat|dog", "cat", "dog"]), None, {"Cat": 20, "cat": 20, "dog": 40},
        "labels that differ in case or zeros alone: 'Cat' 20, 'cat' 20",
    ),
    "a missing file": (
        write_rows(["a|b", "a"]).replace("07.png", "gone.png"), None, "line 9: gone.png is not a file", "",
    ),
    "a label on every image": (
        write_rows(["photo|a", "photo|b", "photo"]), None, {"a": 20, "b": 20, "photo": 60},
        "every training image has the label photo; add others, or leave it out",
    ),
    "no labels at all": (write_rows([""]), "multilabel", "names fewer than two classes: none", ""),
    "lists and texts": (
        write_lines([["a", "b"], "a", ["c"], "b"]), None, {"a": 30, "b": 30, "c": 15}, "",
    ),
    "objects": (write_lines([["a", "b"], {"a": 1}]), None, r"\{'a': 1\} is not a list of labels", ""),
    "one list a class": (write_lines([["a"], ["b"]]), None, {"a": 30, "b": 30}, ""),
    "classes as the user says": (
        write_rows(["a|b", "a", "b"]), "classes", {"a": 20, "a|b": 20, "b": 20}, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_odd_labels_are_right_or_a_sentence(folder: Path, case: str) -> None:
    text, task, expected, note = BAD[case]
    table = folder / ("odd.jsonl" if text.startswith("{") else "odd.csv")
    table.write_text(text, encoding="utf-8")

    def read() -> ImageDataset:
        return open_dataset("folder", root=table, labels=LabelRule(task=task)).split("train")

    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected) as caught:
            read()
        assert "\n" not in str(caught.value)
        return
    read()
    splits = open_dataset("folder", root=table, labels=LabelRule(task=task))
    images = splits.split("all")
    if isinstance(expected, int):
        assert len(images.class_names) == expected
        assert len(splits.describe_classes()) < 1000
        return
    counts = dict(zip(images.class_names, images.class_counts.tolist(), strict=True))
    assert counts == expected
    single = case in (
        "a class with a sign",
        "one joined class",
        "ranges",
        "one list a class",
        "classes as the user says",
    )
    assert images.is_multilabel != single
    assert not note or re.search(note, " ".join(images.notes))
