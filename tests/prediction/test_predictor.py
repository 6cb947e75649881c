"""`vit.Predictor`: a batch in any form becomes columns, with the bits of `vit.predict`."""

import io
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vit
from tests.conftest import SaveModel, save_noise

_OPTIONS = {"device": "cpu", "precision": "float32"}


@pytest.fixture
def model(save_model: SaveModel, tmp_path: Path) -> Path:
    return save_model(tmp_path / "model.safetensors", class_names=("bee", "cat", "dog"))


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    paths = save_noise(tmp_path, [f"{number}.png" for number in range(7)])
    paths[3].write_bytes(b"no image")
    return paths


def _read_all(paths: list[Path]) -> list[bytes]:
    return [path.read_bytes() for path in paths]


def _as_columns(paths: list[Path]) -> dict[str, Any]:
    # as Ray passes them
    return {
        "image": np.array(_read_all(paths), dtype=object),
        "path": np.array(list(map(str, paths))),
        "site": np.arange(len(paths)),
    }


@pytest.mark.parametrize(
    "build",
    [
        list,
        _read_all,
        _as_columns,
        lambda paths: {"path": list(map(str, paths))},
        lambda paths: {"image": [{"bytes": each, "path": None} for each in _read_all(paths)]},
        lambda paths: {"image": [Image.open(io.BytesIO(each)) for each in _read_all(paths[:3])]},
        lambda paths: [np.asarray(Image.open(path)) for path in paths[:3]],
    ],
)
def test_columns_are_those_of_predict_whatever_the_batch(
    model: Path, paths: list[Path], build: Callable[[list[Path]], Any]
) -> None:
    batch = build(paths)
    predictor = vit.Predictor(model, **_OPTIONS)  # type: ignore[arg-type]
    columns = predictor(batch)
    expected = vit.predict(model, paths, **_OPTIONS).predictions  # type: ignore[arg-type]
    count = len(columns["path"])
    assert {len(column) for column in columns.values()} == {count}
    for row, prediction in enumerate(expected[:count]):
        assert (columns["error"][row] is None) == (prediction.error is None)
        if prediction.error is not None:
            assert columns["predicted"][row] is None
            assert np.isnan(columns["probabilities"][row]).all()
            continue
        index, name, probability = prediction.classes[0]
        assert columns["predicted"][row] == name
        assert columns["probability"][row] == pytest.approx(probability, abs=1e-6)
        assert columns["probabilities"][row, index] == pytest.approx(probability, abs=1e-6)
    if isinstance(batch, dict) and "site" in batch:
        assert "image" not in columns
        assert columns["site"].tolist() == list(range(count))
        assert columns["path"].tolist() == list(map(str, paths))


@pytest.mark.extended
def test_it_is_sent_to_a_new_process(model: Path, paths: list[Path]) -> None:
    predictor = vit.Predictor(model, **_OPTIONS)  # type: ignore[arg-type]
    expected = predictor(paths[:2])
    # without the opened model
    assert len(pickle.dumps(predictor)) < 2000
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        (columns,) = pool.map(predictor, [paths[:2]])
    np.testing.assert_array_equal(columns["probabilities"], expected["probabilities"])


def test_probabilities_of_some_classes_add_up_to_1(model: Path, paths: list[Path]) -> None:
    whole = vit.Predictor(model, **_OPTIONS)(paths)  # type: ignore[arg-type]
    predictor = vit.Predictor(model, classes=["dog", "bee"], **_OPTIONS)  # type: ignore[arg-type]
    columns = predictor(paths)
    expected = whole["probabilities"][:, [0, 2]]
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(columns["probabilities"][:, [0, 2]], expected, rtol=1e-5)
    assert np.nan_to_num(columns["probabilities"][:, 1]).tolist() == [0] * len(paths)
    (prediction, *_) = predictor.predict_items([("photo", paths[0])])
    assert {place: name for place, name, _ in prediction.classes} == {0: "bee", 2: "dog"}
    with pytest.raises(ValueError, match="unknown class 'cow'; known: 0 to 2 or bee, cat, dog"):
        vit.Predictor(model, classes="cow")(paths)


def test_wrong_batches_and_options_are_refused(model: Path, paths: list[Path]) -> None:
    predictor = vit.Predictor(model)
    with pytest.raises(ValueError, match="the batch has the columns photo; name one image"):
        predictor({"photo": paths})
    for one in (str(paths[0]), Image.new("RGB", (8, 8))):
        with pytest.raises(ValueError, match="put it into a list"):
            predictor(one)
    assert predictor([np.zeros((0, 0, 3), np.uint8)])["error"] == ["the image has no pixels"]
    # a row of a table may hold none
    assert predictor([None])["error"][0]
