"""Predictions keep the order of the images, and say in its place what can't be read."""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.conftest import save_noise
from vit.bundle import Bundle
from vit.data.images import ImageInputs
from vit.prediction.predict import list_inputs
from vit.prediction.predictor import Predictor
from vit.prediction.records import Prediction, write_predictions


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_noise(tmp_path / "images", ("b/2.png", "a/1.jpg", "c.webp"))
    (tmp_path / "images" / "notes.txt").write_text("no image")
    return tmp_path / "images"


def run(
    bundle: Bundle, images: ImageInputs, *, top_k: int = 3, temperature: float = 1.0
) -> list[Prediction]:
    heated = replace(bundle, metadata={"temperature": temperature})
    predictor = Predictor(heated, top_k=top_k, batch_size=2, precision="float32")
    return list(predictor.predict_items(list_inputs(images)))


def test_files_and_folders_are_predicted_in_order(bundle: Bundle, folder: Path) -> None:
    predictions = run(bundle, [f"{folder}/b/2.png", str(folder), f"{folder}/b"])
    names = [str(Path(prediction.path).relative_to(folder)) for prediction in predictions]
    assert names == ["b/2.png", "a/1.jpg", "b/2.png", "c.webp", "b/2.png"]


def test_probabilities_are_the_models_sorted(bundle: Bundle, folder: Path) -> None:
    path = folder / "a" / "1.jpg"
    (prediction,) = run(bundle, [path], top_k=10, temperature=2.0)
    with torch.inference_mode():
        logits = bundle.model(bundle.preprocess([Image.open(path).convert("RGB")]))[0].double()
    expected = (logits / 2).softmax(dim=0)
    for index, name, probability in prediction.classes:
        assert name == bundle.class_names[index]
        assert probability == pytest.approx(float(expected[index]), abs=1e-6)
    values = [probability for _, _, probability in prediction.classes]
    assert values == sorted(values, reverse=True)
    assert sum(values) == pytest.approx(1)
    assert prediction.probabilities == pytest.approx(expected.numpy(), abs=1e-6)


def test_the_unreadable_are_reported_in_their_place(bundle: Bundle, folder: Path) -> None:
    (folder / "broken.png").write_bytes((folder / "b" / "2.png").read_bytes()[:100])
    paths = [folder / "c.webp", folder / "broken.png", folder / "gone.png", folder / "b" / "2.png"]
    predictions = run(bundle, paths)
    assert [prediction.path for prediction in predictions] == [str(path) for path in paths]
    assert "can't be read as an image" in str(predictions[1].error)
    assert predictions[2].error == "No such file or directory"
    assert [len(prediction.classes) for prediction in predictions] == [3, 0, 0, 3]


def test_only_one_batch_is_in_memory(bundle: Bundle, folder: Path) -> None:
    taken = 0

    def paths() -> Iterator[str]:
        nonlocal taken
        for _ in range(1000):
            taken += 1
            yield f"{folder}/c.webp"

    predictor = Predictor(bundle, top_k=1, batch_size=2)
    predictions = predictor.predict_items(list_inputs(paths()))
    for _ in range(5):
        next(predictions)
    assert taken <= 8  # three batches of two, and one that is decoded meanwhile


def write(predictions: list[Prediction], kind: str) -> str:
    file = io.StringIO()
    assert list(write_predictions(predictions, file=file, kind=kind)) == predictions
    return file.getvalue()


def test_lines_hold_what_was_predicted() -> None:
    predictions = [
        Prediction("a.png", [(1, "dog, the", 0.75), (0, "cat", 0.25)], None, ["dog, the"], 0.5),
        Prediction("b.png", [], error="truncated"),
    ]
    first, second = map(json.loads, write(predictions, "jsonl").splitlines())
    assert first == {
        "path": "a.png",
        "predicted": "dog, the",
        "probability": 0.75,
        "predictions": [
            {"index": 1, "name": "dog, the", "probability": 0.75},
            {"index": 0, "name": "cat", "probability": 0.25},
        ],
        "note": "",
        "prediction_set": ["dog, the"],
        "p_value": 0.5,
    }
    assert second == {"path": "b.png", "error": "truncated"}
    rows = list(csv.DictReader(io.StringIO(write(predictions, "csv"))))
    names = ("path", "predicted", "probability", "prediction_set", "p_value", "error")
    assert [[row[name] for name in names] for row in rows] == [
        ["a.png", "dog, the", "0.75", "dog, the", "0.5", ""],
        ["b.png", "", "", "", "", "truncated"],
    ]


def test_a_reader_gets_a_line_for_each_image_with_its_doubt() -> None:
    classes = [(0, "cat", 0.6), (1, "dog", 0.4)]
    predictions = [
        Prediction("a b.png", classes, prediction_set=["cat"], p_value=0.05),
        Prediction("b.png", classes, prediction_set=["cat", "dog"], p_value=0.5),
        Prediction("c.png", classes, prediction_set=["cat"], p_value=0.06),
        Prediction("d.png", classes),  # a model file without thresholds
        Prediction("e.png", [], error="truncated"),
    ]
    assert write(predictions, "table").splitlines() == [
        " 60.0 %  cat               unusual  a b.png",
        " 60.0 %  cat               unsure   b.png",
        " 60.0 %  cat                        c.png",
        " 60.0 %  cat                        d.png",
        "e.png: truncated",
    ]


def test_lines_about_several_labels_say_labels() -> None:
    classes = [(0, "cat", 0.6), (1, "dog", 0.4)]
    predictions = [
        Prediction("a.png", classes, labels=["cat", "dog"]),
        Prediction("b.png", classes, labels=[]),
    ]
    assert write(predictions, "table").splitlines() == [
        "         cat, dog                   a.png",
        "         no label                   b.png",
    ]
    rows = csv.DictReader(io.StringIO(write(predictions, "csv")))
    assert [row["labels"] for row in rows] == ["cat|dog", ""]
    lines = write(predictions, "jsonl").splitlines()
    assert [json.loads(line)["labels"] for line in lines] == [["cat", "dog"], []]
