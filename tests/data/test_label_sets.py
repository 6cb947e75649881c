"""Several labels an image: recognised in tables and in Python's objects, and divided into splits."""

import json
from collections.abc import Callable
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
    with pytest.raises(ValueError, match=r"sampler draws classes.*take weights"):
        choose_class_balance(labels, wanted="sampler")


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
