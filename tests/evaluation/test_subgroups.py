"""Accuracy by the values of a column: counts worked by hand, intervals, and a test of its level."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.stats import chi2_contingency
from sklearn.metrics import average_precision_score, balanced_accuracy_score

from tests.conftest import Launcher, SaveModel
from tests.schemas import check_document
from vit.data.open import open_dataset
from vit.data.preprocess import Preprocess
from vit.data.sources.python_objects import read_map_style
from vit.evaluation import subgroups
from vit.evaluation.clusters import compute_clustered_interval, compute_proportion_interval
from vit.evaluation.label_metrics import score_label_logits
from vit.evaluation.metrics import score_logits
from vit.evaluation.subgroups import build_tables, compute_permutation_p_value, read_values


def make_scores(correct: np.ndarray) -> Any:
    """Scores of two classes in turn, right where `correct` says so."""
    labels = np.arange(len(correct)) % 2
    predicted = np.where(correct, labels, 1 - labels)
    return score_logits(np.eye(2, dtype=np.float32)[predicted], labels)


def test_counts_intervals_and_order_are_those_worked_by_hand() -> None:
    site = ["a"] * 20 + ["b"] * 30 + ["rare"] * 4 + ["odd"] * 3 + [""] * 10
    correct = np.ones(67, dtype=bool)
    correct[:8] = False  # 12 of 20
    correct[20:23] = False  # 27 of 30
    correct[50] = False  # 6 of 7
    (table,) = build_tables({"site": site}, make_scores(correct), None)
    rows = {row.name: row for row in table.rows}
    assert [row.name for row in table.rows] == ["a", "2 others", "b", "no value"]
    assert (rows["a"].num_images, rows["a"].accuracy) == (20, 12 / 20)
    assert rows["a"].interval == pytest.approx(compute_proportion_interval(12, 20))
    assert rows["2 others"].accuracy == 6 / 7
    assert rows["b"].accuracy == 27 / 30
    labels = np.arange(20) % 2
    predicted = np.where(correct[:20], labels, 1 - labels)
    assert rows["a"].mean == pytest.approx(balanced_accuracy_score(labels, predicted))
    assert rows["a"].num_groups is None
    # the test is that of the table of counts, whose asymptotic p-value is near
    counts = [[12, 8], [27, 3], [6, 1], [10, 0]]
    assert table.p_value == pytest.approx(chi2_contingency(counts).pvalue, abs=0.015)
    assert table.p_value < 0.05
    assert table.describe().startswith("Top-1 accuracy by site: 60 % for a, 100 % for no value;")
    assert "differences are larger than chance gives (p = 0.0" in table.describe()
    assert "joined" in table.notes[0]


def test_groups_widen_intervals_and_change_places_as_a_whole() -> None:
    # 12 patients of 10 images each, all alike; two sites
    correct = np.repeat([1, 1, 1, 1, 1, 0, 1, 1, 0, 0, 1, 0], 10).astype(bool)
    groups = np.repeat([f"patient {number}" for number in range(12)], 10).tolist()
    site = np.repeat(["a", "b"], 60).tolist()
    by_group, by_image = (
        build_tables({"site": site}, make_scores(correct), chosen)[0] for chosen in (groups, None)
    )
    row = by_group.rows[0]
    assert (row.name, row.num_groups, row.accuracy) == ("b", 6, 0.5)
    clusters = np.repeat(np.arange(6), 10)
    assert row.interval == compute_clustered_interval(correct[60:], clusters)
    assert row.interval[1] - row.interval[0] > 2 * (
        by_image.rows[0].interval[1] - by_image.rows[0].interval[0]
    )
    # of 12 patients 4 are wrong; 3 or more of them, or at most 1, are at one site in
    # (2 C(4,3) C(8,3) + 2 C(4,4) C(8,2)) / C(12,6) = 504 of 924 draws
    assert by_group.p_value == pytest.approx(504 / 924, abs=0.04)
    assert by_image.p_value < 0.01
    # by patient: each is one group, of which its images tell
    (table,) = build_tables({"group": groups}, make_scores(correct), groups)
    assert table.rows[0].interval == pytest.approx(compute_proportion_interval(0, 10))
    assert any("by image" in note for note in table.notes)


@pytest.mark.parametrize("inside", [False, True])
def test_a_true_difference_alone_is_found(monkeypatch: Any, inside: bool) -> None:
    """Patients differ, sites don't: of 120 data sets about 6 have p below 0.05."""
    monkeypatch.setattr(subgroups, "_NUM_DRAWS", 99)
    rng = np.random.default_rng(0)
    p_values, naive = [], []
    for _ in range(120):
        rates = rng.beta(1, 1, size=20)
        clusters = np.repeat(np.arange(20), 8)
        correct = rng.random(160) < rates[clusters]
        # sites of whole patients, or each patient at both sites
        parts = rng.integers(2, size=160) if inside else clusters % 2
        p_values.append(compute_permutation_p_value(correct, parts, clusters))
        naive.append(compute_permutation_p_value(correct, parts, np.arange(160)))
    assert np.mean(np.array(p_values) <= 0.05) < 0.1
    if not inside:
        assert np.mean(np.array(naive) <= 0.05) > 0.2
    # within patients, a difference is found whatever the patients
    correct = rng.random(160) < np.where(parts, 0.9, 0.5)
    if inside:
        assert compute_permutation_p_value(correct, parts, clusters) < 0.05


def test_numbers_and_dates_are_cut_into_quartiles_and_tables_corrected() -> None:
    ages = [str(age) for age in range(20, 100)]
    days = [f"2026-03-{1 + number // 4:02d} 10:00" for number in range(80)]
    correct = np.arange(80) >= 15
    tables = build_tables({"age": ages, "day": days}, make_scores(correct), None)
    assert tables[0].rows[0].name == "20 to 39"
    assert tables[0].rows[0].accuracy == 5 / 20
    assert tables[1].rows[0].name == "2026-03-01 10:00 to 2026-03-05 10:00"
    assert "80 values of age are cut into quartiles" in tables[0].notes[0]
    assert tables[0].corrected_p_value == 2 * tables[0].p_value


def test_several_labels_have_exact_match_and_average_precision() -> None:
    rng = np.random.default_rng(0)
    labels = rng.random((60, 3)) < 0.4
    logits = (3 * (labels - 0.5) + rng.normal(size=(60, 3))).astype(np.float32)
    scores = score_label_logits(logits, labels)
    camera = ["x", "y"] * 30
    (table,) = build_tables({"camera": camera}, scores, None)
    assert table.titles[0] == "Exact match"
    for row in table.rows:
        own = slice(0 if row.name == "x" else 1, None, 2)
        assert row.accuracy == ((logits[own] >= 0) == labels[own]).all(axis=1).mean()
        assert row.mean == pytest.approx(average_precision_score(labels[own], logits[own]))
        assert row.mean_interval[0] < row.mean < row.mean_interval[1]


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
    assert "by site name" in screen
    evaluation = json.loads((out / "evaluation.json").read_text())
    sites, patients = check_document("evaluation", evaluation)["subgroups"]
    assert [row["num_images"] for row in patients["rows"]] == [6] * 8
    with (out / "predictions.csv").open() as file:
        predictions = list(csv.DictReader(file))
    site_of = {row[0]: row[3] for row in rows}
    for row in sites["rows"]:
        own = [each for each in predictions if site_of[each["path"]] == row["name"]]
        assert (row["num_images"], len(own), row["num_groups"]) == (16, 16, 8)
        assert row["accuracy"] == np.mean([each["label"] == each["predicted"] for each in own])
    assert "| Site 1 |" in (out / "evaluation.md").read_text()
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
    passed = read_map_style(table, "test", ("b", "c"))
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
        ValueError, match="--by id: each of its 101 values has fewer than 10 images"
    ):
        read_values(many, "id")
