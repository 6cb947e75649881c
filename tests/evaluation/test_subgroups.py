"""Accuracy by the values of a column: counts worked by hand, and intervals by group."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from tests.conftest import Launcher, SaveModel, save_noise
from vit.data.preprocess import Preprocess
from vit.evaluation.intervals import compute_proportion_interval
from vit.evaluation.metrics import score_logits
from vit.evaluation.subgroups import Subgroup, measure_subgroups, read_values, tells_class


def measure(values: list[str], correct: np.ndarray, groups: list[str] | None) -> list[Subgroup]:
    labels = np.zeros(len(values), int)
    scores = score_logits(np.where(correct[:, None], (1, 0), (0, 1)).astype(np.float32), labels)
    return measure_subgroups(values, scores, groups)


def test_counts_intervals_and_order_are_those_worked_by_hand() -> None:
    site = ["a"] * 20 + ["b"] * 30 + ["rare"] * 4 + [""] * 13
    correct = np.ones(67, dtype=bool)
    correct[:8] = False  # 12 of 20
    correct[20:23] = False  # 27 of 30
    correct[50] = False  # 3 of 4
    rows = {row.name: row for row in measure(site, correct, None)}
    assert list(rows) == ["a", "rare", "b", "no value"]
    assert (rows["a"].num_images, rows["a"].metric, rows["a"].num_groups) == (20, 12 / 20, 20)
    assert rows["a"].interval == pytest.approx(compute_proportion_interval(12, 20))
    assert rows["rare"].metric == 3 / 4


def test_several_labels_are_measured_by_the_average_precision() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(60, 3)).astype(np.float32)
    labels = logits + rng.normal(size=(60, 3)) > 0
    site = np.arange(60) % 2
    rows = measure_subgroups(["ab"[each] for each in site], score_logits(logits, labels), None)
    for row in rows:
        own = site == "ab".index(row.name)
        expected = average_precision_score(labels[own], logits[own], average="macro")
        assert row.metric == pytest.approx(expected)
        assert row.interval[0] < expected < row.interval[1]


def test_intervals_of_a_value_allow_for_groups() -> None:
    correct = np.arange(40) % 10 < 7
    (alone,) = measure(["a"] * 40, correct, None)
    groups = [str(number) for number in range(40) for _ in range(4)]
    (copied,) = measure(["a"] * 160, correct.repeat(4), groups)
    assert copied.num_groups == 40
    assert copied.interval == pytest.approx(alone.interval, abs=0.02)


def test_numbers_and_codes_are_values() -> None:
    """Twenty sites 100 to 119 are no quantity."""
    sites = [str(100 + number % 20) for number in range(200)]
    rows = measure(sites, np.arange(200) % 20 != 7, None)
    assert len(rows) == 20
    assert (rows[0].name, rows[0].metric) == ("107", 0.0)


def test_a_scanner_for_each_class_tells_the_class() -> None:
    def tell(values: str, labels: Any, num_groups: int = 8) -> bool:
        images: Any = SimpleNamespace(labels=np.array(labels), num_groups=num_groups)
        return tells_class(list(values), images)

    classes = [0, 0, 0, 0, 1, 1, 1, 1]
    assert tell("AAAABBBB", classes)
    assert tell("AAAABBCC", classes)
    assert tell("AAAABBBB", np.array(classes)[:, None] == (0, 1))
    # one other image, one class, and a patient for each group
    assert not tell("AAAABBBA", classes)
    assert not tell("AAAABBBB", [0] * 8)
    assert not tell("AAAABBBB", classes, num_groups=2)


def write_images(folder: Path) -> list[tuple[str, ...]]:
    """Write 48 images, and return for each its file, class, patient and site."""
    names = [f"{number:02d}.png" for number in range(48)]
    save_noise(folder, names)
    return [
        (name, "bc"[number % 2], f"p{number // 6}", f"Site {number % 3}")
        for number, name in enumerate(names)
    ]


def test_a_column_of_the_table_is_read(
    cli: Launcher, save_model: SaveModel, tmp_path: Path
) -> None:
    rows = write_images(tmp_path)
    data, out = tmp_path / "labels.csv", tmp_path / "out"
    lines = ["path;label;group;Site Name", *(";".join(row) for row in rows)]
    data.write_text("\n".join(lines))
    model = save_model(
        tmp_path / "model.safetensors",
        preprocess=Preprocess((16, 16)),
        class_names=("b", "c"),
        embed_dim=16,
        num_heads=2,
    )
    arguments = ("evaluate", model, "--data", data, "--split", "all", "--num-examples", "0", "--by")
    cli.succeed(*arguments, "Site Name,group", "--output", out)
    evaluation = json.loads((out / "evaluation.json").read_text())
    sites, patients = evaluation["subgroups"]["Site Name"], evaluation["subgroups"]["group"]
    assert [row["num_images"] for row in patients] == [6] * 8
    with (out / "predictions.csv").open() as file:
        predictions = list(csv.DictReader(file))
    site_of = {row[0]: row[3] for row in rows}
    for row in sites:
        own = [each for each in predictions if site_of[each["path"]] == row["name"]]
        assert (row["num_images"], len(own), row["num_groups"]) == (16, 16, 8)
        assert row["metric"] == np.mean([each["label"] == each["predicted"] for each in own])
    report = (out / "report.html").read_text()
    assert 'id="subgroups"' in report
    assert all(f"<td>Site {number}</td>" in report for number in range(3))
    message = cli.fail(*arguments, "camera")
    assert "has no column 'camera'; they are 'path', 'label', 'group', 'Site Name'" in message


def test_a_column_that_is_no_table_is_refused() -> None:
    ids = tuple(map(str, range(101)))
    dataset: Any = SimpleNamespace(ids=ids, rows=None)
    with pytest.raises(ValueError, match="--by site needs a table with that column"):
        read_values(dataset, "site")
    dataset.rows = {}
    dataset.read_column = lambda name: {each: f"{name}{each}" for each in ids}
    with pytest.raises(ValueError, match="--by id: it has 101 values, and a table shows at most"):
        read_values(dataset, "id")
    dataset.read_column = lambda name: {"1": "7"}
    assert list(read_values(dataset, "id").values())[:3] == ["", "7", ""]
