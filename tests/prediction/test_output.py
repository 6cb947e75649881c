"""`--output`: rows are written as they are made, and a stopped command goes on with them."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vit
from tests.conftest import SaveModel
from tests.prediction.conftest import read_rows
from vit.prediction import output as output_module
from vit.prediction.predict import iterate_predictions

_FORMATS = (".jsonl", ".csv", ".parquet")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, save_model: SaveModel) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model.safetensors")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number in range(30):
        pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"={number:02d}, é.png")
    (folder / "=20, é.png").rename(folder / '=20 "\n, é.png')
    # the first two of a part or file can't be read, so the number of columns isn't known at once
    for number in (0, 1, 17):
        (folder / f"={number:02d}, é.png").write_bytes(b"no image")
    return folder


def run(model: Path, photos: Path, path: Path, **options: Any) -> Iterator[Any]:
    defaults = {
        "resume": False, "sort_into": None, "sort": "none", "batch_size": 4, "device": "cpu",
        "precision": "float32",
    }  # fmt: skip
    return iterate_predictions(model, photos, output=path, **(defaults | options))


@pytest.mark.parametrize("suffix", _FORMATS)
def test_a_stopped_command_goes_on_without_a_second_or_missing_row(
    model: Path, photos: Path, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    monkeypatch.setattr(output_module, "_PART_ROWS", 8)
    options = {"top_k": 2, "embeddings": suffix != ".csv"}
    whole = tmp_path / f"whole{suffix}"
    assert len(list(run(model, photos, whole, **options))) == 30
    path = tmp_path / f"broken{suffix}"
    for count in (1, 7, 0, 9):
        predictions = run(model, photos, path, resume=True, **options)
        for _ in range(count):
            next(predictions)
        predictions.close()  # type: ignore[attr-defined]
        if suffix != ".parquet" and path.exists():
            with path.open("ab") as file:
                file.write(b'{"path": "half')
    (path / ".part-00001.parquet.aa.tmp").write_bytes(b"half") if suffix == ".parquet" else None
    list(run(model, photos, path, resume=True, **options))
    assert read_rows(path) == read_rows(whole)
    if suffix == ".parquet":
        (path / "part-00001.parquet").write_bytes(b"PAR1")
        with pytest.raises(ValueError, match="remove it and the parts after it"):
            list(run(model, photos, path, resume=True, **options))
        for part in sorted(path.glob("part-*"))[1:]:
            part.unlink()
        list(run(model, photos, path, resume=True, **options))
    # nothing is left to do
    assert list(run(model, photos, path, resume=True, **options)) == []
    assert read_rows(path) == read_rows(whole)
    rows = read_rows(whole)
    assert [row["path"].lstrip("'") for row in rows] == sorted(map(str, photos.iterdir()))
    assert {row["precision"] for row in rows} == {"float32"}
    assert sum(bool(row.get("error")) for row in rows) == 3
    assert len({len(row) for row in rows}) == (2 if suffix == ".jsonl" else 1)


def test_parquet_has_the_columns_of_the_predictor(
    model: Path, photos: Path, tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow")
    result = vit.predict(
        model, photos, output=tmp_path / "rows.parquet", device="cpu", precision="float32"
    )
    assert result.predictions == []
    rows = read_rows(tmp_path / "rows.parquet")
    columns = vit.Predictor(model, device="cpu", precision="float32")(sorted(photos.iterdir()))
    assert list(rows[0]) == list(columns)
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            if row["error"] is not None and name not in ("path", "precision", "error", "note"):
                assert row[name] is None
            elif not (row[name] is None and isinstance(value, float)):
                assert row[name] == (value.tolist() if name == "probabilities" else value)


def _remove_options(path: Path, **_: Any) -> None:
    path.with_name(f"{path.name}.options.json").unlink()


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ({"resume": False}, None, "is there already; add --resume to go on with it"),
        ({"top_k": 3}, None, "was written with top_k 2, not 3; use the same"),
        ({"precision": "bfloat16"}, None, "was written with precision float32, not bfloat16"),
        ({"sort": "uncertainty"}, None, "leave out --sort"),
        ({}, _remove_options, "can't be resumed without rows.jsonl.options.json"),
        ({}, lambda path, photos: (photos / "=00, é.png").unlink(), "row 1 of .* the same images"),
        ({}, lambda path, photos: (photos / "=29, é.png").unlink(), "is now missing; name the"),
    ],
)
def test_other_options_and_images_are_not_resumed(
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
    before = path.read_bytes()
    if change:
        change(path=path, photos=tmp_path / "photos")
    options = {"resume": True, "top_k": 2} | options
    with pytest.raises((ValueError, OSError), match=message):
        list(run(model, tmp_path / "photos", path, **options))
    assert path.read_bytes() == before


def test_another_model_does_not_go_on(
    model: Path, photos: Path, tmp_path: Path, save_model: SaveModel
) -> None:
    path = tmp_path / "rows.jsonl"
    list(run(model, photos, path))
    other = save_model(tmp_path / "model.safetensors", class_names=("x", "y", "z"))
    with pytest.raises(ValueError, match=r"was written with model .*, not "):
        list(run(other, photos, path, resume=True))


def test_wrong_places_are_refused_before_the_work(
    model: Path, photos: Path, tmp_path: Path
) -> None:
    for name, options, message in (
        ("rows.txt", {}, "ends in none of .jsonl, .csv, .parquet"),
        ("none/rows.csv", {}, "there is no folder"),
        ("rows.csv", {"embeddings": True}, "has no place for --embeddings; name a .jsonl"),
        ("rows.csv", {"similar": 1}, "has no place for --similar; name a .jsonl"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            list(run(model, photos, tmp_path / name, **options))
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="name it with --output"):
        vit.predict(model, photos, resume=True)
