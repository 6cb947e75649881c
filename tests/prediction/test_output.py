"""`--output`: rows are written as they are made, and a stopped command goes on with them."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vit
from tests.conftest import SaveModel, save_noise
from tests.prediction.conftest import read_rows
from vit.prediction.predict import iterate_predictions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, save_model: SaveModel) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model.safetensors")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos #1")
    save_noise(folder, [f"={number:02d}, é.png" for number in range(30)], size=(16, 16))
    (folder / "=20, é.png").rename(folder / '=20 "\n, é.png')
    # a name that isn't UTF-8
    (folder / "=21, é.png").rename(folder / "=21\udcff.png")
    for number in (0, 1, 17):
        (folder / f"={number:02d}, é.png").write_bytes(b"no image")
    return folder


def run(model: Path, photos: Path, path: Path, **options: Any) -> Iterator[Any]:
    defaults = {"batch_size": 4, "device": "cpu", "precision": "float32"}
    return iterate_predictions(model, photos, output=path, **(defaults | options))


def assert_rows_are_close(row: Any, expected: Any) -> None:
    """Assert that two values of JSON are equal, numbers with a fraction within 1e-6."""
    assert type(row) is type(expected)
    if isinstance(row, dict):
        assert list(row) == list(expected)
        row, expected = list(row.values()), list(expected.values())
    if isinstance(row, list):
        assert len(row) == len(expected)
        for one, other in zip(row, expected, strict=True):
            assert_rows_are_close(one, other)
    else:
        assert row == (pytest.approx(expected, abs=1e-6) if isinstance(row, float) else expected)


def test_a_stopped_command_goes_on_without_a_second_or_missing_row(
    model: Path, photos: Path, tmp_path: Path
) -> None:
    options = {"top_k": 2}
    # no part of a name means anything
    whole = tmp_path / "whole #1: 'a' \"b\".jsonl"
    assert len(list(run(model, photos, whole, **options))) == 30
    path = tmp_path / "broken.jsonl"
    for count in (1, 7, 0, 9):
        predictions = run(model, photos, path, resume=True, **options)
        for _ in range(count):
            next(predictions)
        predictions.close()  # type: ignore[attr-defined]
        if path.exists():
            with path.open("ab") as file:
                file.write(b'{"path": "half')
    list(run(model, photos, path, resume=True, **options))
    # nothing is left to do, and nothing lies beside the file
    complete = path.read_bytes()
    assert list(run(model, photos, path, resume=True, **options)) == []
    assert path.read_bytes() == complete
    assert sorted(tmp_path.iterdir()) == sorted([path, whole])
    rows = read_rows(whole)
    # Batches of other sizes change the last bits.
    found = read_rows(path)
    assert len(found) == len(rows)
    for row, expected in zip(found, rows, strict=True):
        assert_rows_are_close(row, expected)
    assert [row["path"] for row in rows] == sorted(map(str, photos.iterdir()))
    assert sum("error" in row for row in rows) == 3


def test_csv_has_the_same_predictions_and_finds_its_files(
    model: Path, photos: Path, tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    predictions = list(run(model, photos, path))
    rows = read_rows(path)
    for prediction, row in zip(predictions, rows, strict=True):
        assert row["predicted"] == (prediction.predicted or "")
        assert bool(row["error"]) == (prediction.error is not None)
        # each name still finds its file
        assert Path(row["path"]).exists()
    with pytest.raises(ValueError, match=r"--resume goes on with \.jsonl alone"):
        list(run(model, photos, path, resume=True))


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ({"resume": False}, None, "is there already; add --resume, or choose another"),
        ({}, lambda path, photos: (photos / "=00, é.png").unlink(), "line 1 of .* the same images"),
        ({}, lambda path, photos: (photos / "=29, é.png").unlink(), "is now missing; name the"),
        ({}, lambda path, photos: path.write_text("{}\n"), "line 1 of .* is no prediction"),
    ],
)
def test_other_images_and_files_are_not_resumed(
    model: Path,
    photos: Path,
    tmp_path: Path,
    options: dict[str, Any],
    change: Callable[..., None] | None,
    message: str,
) -> None:
    shutil.copytree(photos, tmp_path / "photos")
    path = tmp_path / "rows.jsonl"
    list(run(model, tmp_path / "photos", path, top_k=2))
    if change:
        change(path=path, photos=tmp_path / "photos")
    before = path.read_bytes()
    options = {"resume": True, "top_k": 2} | options
    with pytest.raises(ValueError, match=message):
        list(run(model, tmp_path / "photos", path, **options))
    assert path.read_bytes() == before


def test_a_table_has_a_column_for_each_class_and_names_images_as_it_was_written(
    model: Path, photos: Path, tmp_path: Path
) -> None:
    names = ["-b", "a0", "gone"]
    for name, photo in zip(names[:2], sorted(photos.iterdir())[2:4], strict=True):
        shutil.copy(photo, tmp_path / f"{name}.png")
    table = tmp_path / "sample_submission.csv"
    table.write_text("".join(f"{name},0\n" for name in ["id_code", *names]))
    path = tmp_path / "out.csv"
    predictions = list(run(model, table, path, columns="classes"))
    classes = vit.load_bundle(model).class_names
    for name, row, prediction in zip(names, read_rows(path), predictions, strict=True):
        assert list(row) == ["id_code", *classes]
        assert row.pop("id_code") == name
        values = [np.float32(value) for value in row.values()]
        np.testing.assert_array_equal(values, prediction.probabilities)
        assert np.isnan(values).all() == (name == "gone")
    path.unlink()
    (first, *_) = run(model, photos, path, columns="classes")
    assert read_rows(path)[0]["path"] == first.path
    with pytest.raises(ValueError, match=r"name it with --output FILE\.csv"):
        list(run(model, table, tmp_path / "out.jsonl", columns="classes"))


def test_a_wrong_place_is_refused_before_anything_is_predicted(
    model: Path, photos: Path, tmp_path: Path
) -> None:
    for name, error in (("x.parquet", ValueError), ("no/x.csv", FileNotFoundError)):
        with pytest.raises(error, match=name):
            list(run(model, photos, tmp_path / name))
    assert list(tmp_path.iterdir()) == []
