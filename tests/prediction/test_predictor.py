"""`vit.Predictor`: a batch in any form gets the predictions of `vit.predict`."""

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


@pytest.mark.parametrize(
    "build",
    [
        list,
        _read_all,
        lambda paths: [{"bytes": each, "path": None} for each in _read_all(paths)],
        lambda paths: [Image.open(io.BytesIO(each)) for each in _read_all(paths[:3])],
        lambda paths: [np.asarray(Image.open(path)) for path in paths[:3]],
    ],
)
def test_predictions_are_those_of_predict_whatever_the_batch(
    model: Path, paths: list[Path], build: Callable[[list[Path]], Any]
) -> None:
    found = vit.Predictor(model, **_OPTIONS)(build(paths))  # type: ignore[arg-type]
    expected = vit.predict(model, paths, **_OPTIONS).predictions  # type: ignore[arg-type]
    for own, prediction in zip(found, expected, strict=len(found) == len(expected)):
        assert (own.error is None) == (prediction.error is None)
        assert own.predicted == prediction.predicted
        assert own.probability == pytest.approx(prediction.probability, abs=1e-6)


@pytest.mark.extended
def test_it_is_sent_to_a_new_process(model: Path, paths: list[Path]) -> None:
    predictor = vit.Predictor(model, **_OPTIONS)  # type: ignore[arg-type]
    expected = predictor(paths[:2])
    # without the opened model
    assert len(pickle.dumps(predictor)) < 2000
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        (found,) = pool.map(predictor, [paths[:2]])
    for own, prediction in zip(found, expected, strict=True):
        np.testing.assert_array_equal(own.probabilities, prediction.probabilities)


def test_probabilities_of_some_classes_add_up_to_1(model: Path, paths: list[Path]) -> None:
    def stack(predictions: list[Any]) -> np.ndarray:
        return np.stack([prediction.probabilities for prediction in predictions])

    whole = stack(vit.Predictor(model, **_OPTIONS)(paths))  # type: ignore[arg-type]
    predictor = vit.Predictor(model, classes=["dog", "bee"], **_OPTIONS)  # type: ignore[arg-type]
    found = stack(predictor(paths))
    expected = whole[:, [0, 2]]
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found[:, [0, 2]], expected, rtol=1e-5)
    assert np.nan_to_num(found[:, 1]).tolist() == [0] * len(paths)
    (prediction, *_) = predictor.predict_items([("photo", paths[0])])
    assert {place: name for place, name, _ in prediction.classes} == {0: "bee", 2: "dog"}
    with pytest.raises(ValueError, match="unknown class 'cow'; known: 0 to 2 or bee, cat, dog"):
        vit.Predictor(model, classes="cow")(paths)


def test_wrong_batches_and_options_are_refused(model: Path, paths: list[Path]) -> None:
    predictor = vit.Predictor(model)
    for one in (str(paths[0]), Image.new("RGB", (8, 8))):
        with pytest.raises(ValueError, match="put it into a list"):
            predictor(one)
    assert predictor([np.zeros((0, 0, 3), np.uint8)])[0].error == "the image has no pixels"
    # a row of a table may hold none
    assert predictor([None])[0].error
