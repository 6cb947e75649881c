"""Accuracy by the values of a column: counts worked by hand, and intervals by group."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import Launcher, SaveModel
from vit.data.open import open_dataset
from vit.data.preprocess import Preprocess
from vit.data.sources.listing import number_listing
from vit.data.sources.python_objects import find_python_objects
from vit.evaluation.clusters import compute_proportion_interval
from vit.evaluation.metrics import score_logits
from vit.evaluation.subgroups import SubgroupTable, build_tables, read_values


def measure(
    column: str, values: list[str], correct: np.ndarray, groups: list[str] | None
) -> SubgroupTable:
    labels = np.zeros(len(values), int)
    scores = score_logits(np.where(correct[:, None], (1, 0), (0, 1)).astype(np.float32), labels)
    (table,) = build_tables({column: values}, scores, groups)
    return table


def test_counts_intervals_and_order_are_those_worked_by_hand() -> None:
    site = ["a"] * 20 + ["b"] * 30 + ["rare"] * 4 + [""] * 13
    correct = np.ones(67, dtype=bool)
    correct[:8] = False  # 12 of 20
    correct[20:23] = False  # 27 of 30
    correct[50] = False  # 3 of 4
    table = measure("site", site, correct, None)
    rows = {row.name: row for row in table.rows}
    assert list(rows) == ["a", "rare", "b", "no value"]
    assert (rows["a"].num_images, rows["a"].metric, rows["a"].num_groups) == (20, 12 / 20, None)
    assert rows["a"].interval == pytest.approx(compute_proportion_interval(12, 20))
    assert rows["rare"].metric == 3 / 4
    assert table.list_rows()[0] == ["a", "20", "60 %", "36–81 %"]


def test_groups_widen_intervals() -> None:
    # 12 patients of 10 images each, all alike; two sites
    correct = np.repeat([1, 1, 1, 1, 1, 0, 1, 1, 0, 0, 1, 0], 10).astype(bool)
    groups = np.repeat([f"patient {number}" for number in range(12)], 10).tolist()
    site = np.repeat(["a", "b"], 60).tolist()
    by_group, by_image = (measure("site", site, correct, chosen) for chosen in (groups, None))
    row = by_group.rows[0]
    assert (row.name, row.num_groups, row.metric) == ("b", 6, 0.5)
    assert row.interval[1] - row.interval[0] > 2 * (
        by_image.rows[0].interval[1] - by_image.rows[0].interval[0]
    )


def test_numbers_and_codes_are_values() -> None:
    """Twenty sites 100 to 119 are no quantity."""
    sites = [str(100 + number % 20) for number in range(200)]
    table = measure("site", sites, np.arange(200) % 20 != 7, None)
    assert len(table.rows) == 20
    assert (table.rows[0].name, table.rows[0].metric) == ("107", 0.0)


def write_images(folder: Path) -> list[tuple[str, ...]]:
    """Write 48 images, and return for each its file, class, patient and site."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(48):
        name = f"{number:02d}.png"
        Image.fromarray(rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(folder / name)
        rows.append((name, "bc"[number % 2], f"p{number // 6}", f"Site {number % 3}"))
    return rows


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
    screen = cli.succeed(*arguments, "site name,group", "--output", out).out
    assert "By site name, the worst of 3" in screen
    evaluation = json.loads((out / "evaluation.json").read_text())
    sites, patients = evaluation["subgroups"]
    assert [row["num_images"] for row in patients["rows"]] == [6] * 8
    with (out / "predictions.csv").open() as file:
        predictions = list(csv.DictReader(file))
    site_of = {row[0]: row[3] for row in rows}
    for row in sites["rows"]:
        own = [each for each in predictions if site_of[each["path"]] == row["name"]]
        assert (row["num_images"], len(own), row["num_groups"]) == (16, 16, 8)
        assert row["metric"] == np.mean([each["label"] == each["predicted"] for each in own])
    assert "Site 1" in screen
    assert 'id="subgroups"' in (out / "report.html").read_text()
    message = cli.fail(*arguments, "camera")
    assert "has no column 'camera'; they are 'path', 'label', 'group', 'Site Name'" in message


def test_a_column_of_parquet_files_and_the_folder_of_an_image_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = write_images(tmp_path)
    columns = {
        "image": [{"bytes": (tmp_path / row[0]).read_bytes(), "path": None} for row in rows],
        "label": [row[1] for row in rows],
        "site": [int(row[3][-1]) for row in rows],
    }
    kinds = {
        "image": datasets.Image(),
        "label": datasets.Value("string"),
        "site": datasets.ClassLabel(names=["north", "south", "west"]),
    }
    table = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
    (tmp_path / "data").mkdir()
    table.to_parquet(str(tmp_path / "data" / "train-00000.parquet"))
    splits = open_dataset("huggingface", root=tmp_path / "data", cache_dir=tmp_path / "cache")
    dataset = splits.split("all")
    values = read_values(dataset, "site")
    assert [values[name] for name in dataset.ids[:4]] == ["north", "south", "west", "north"]
    with pytest.raises(
        ValueError, match="has no column 'camera'; they are 'image', 'label', 'site"
    ):
        read_values(dataset, "camera")
    listing = find_python_objects(table, ("b", "c"), split="test", numbered_classes=("b", "c"))
    passed = number_listing(listing).split("test")
    assert [read_values(passed, "site")[name] for name in passed.ids[:2]] == ["north", "south"]
    for name in ("a", "b"):
        (tmp_path / "folders" / name).mkdir(parents=True)
        for row in rows[:3]:
            (tmp_path / row[0]).rename(tmp_path / "folders" / name / row[0])
        rows = rows[3:]
    dataset = open_dataset("folder", root=tmp_path / "folders").split("all")
    assert sorted(read_values(dataset, "folder").values()) == ["a"] * 3 + ["b"] * 3
    with pytest.raises(
        ValueError, match="--by site: these images are from no table; folder is the"
    ):
        read_values(dataset, "site")
    ids = [f"{number}" for number in range(101)]
    many = replace(dataset, ids=ids, read_column=lambda name: {each: f"x{each}" for each in ids})
    with pytest.raises(
        ValueError, match="--by id: it has 101 values, and a table shows at most 100"
    ):
        read_values(many, "id")
