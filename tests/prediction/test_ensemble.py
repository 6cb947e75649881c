"""Several models: the mean of their probabilities, whatever their depth."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vit
from tests.conftest import Launcher, SaveModel, change_metadata, save_noise
from vit.bundle import open_model
from vit.data.preprocess import Preprocess
from vit.prediction.records import Prediction

NAMES = ("ant", "bee", "cow")


@pytest.fixture
def models(save_model: SaveModel, tmp_path: Path) -> list[Path]:
    """Two models of other depths and temperatures."""
    first = save_model(tmp_path / "a" / "model.safetensors", class_names=NAMES, depth=1)
    second = save_model(
        tmp_path / "b" / "model.safetensors",
        class_names=NAMES,
        depth=2,
        num_heads=2,
    )
    change_metadata(second, {"temperature": 1.5})
    return [first.parent, second]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Four photos each of three classes."""
    names = [f"{name}/{number}.png" for name in NAMES for number in range(4)]
    save_noise(tmp_path / "photos", names, size=(21, 31))
    return tmp_path / "photos"


def read(predictions: list[Prediction]) -> np.ndarray:
    return np.array(
        [[{n: p for _, n, p in each.classes}[name] for name in NAMES] for each in predictions]
    )


def test_probabilities_are_the_mean_of_those_of_the_models(
    models: list[Path], photos: Path, cli: Launcher, tmp_path: Path
) -> None:
    alone = [vit.predict(model, photos, precision="float32").predictions for model in models]
    together = vit.predict(models, photos, precision="float32").predictions
    mean = (read(alone[0]) + read(alone[1])) / 2
    assert abs(read(alone[0]) - read(alone[1])).max() > 0.1
    assert read(together) == pytest.approx(mean, abs=1e-6)
    assert [each.predicted for each in together] == [NAMES[row.argmax()] for row in mean]
    assert together[0].p_value is None
    assert together[0].prediction_set is None

    # on the command line, models come before the photos
    lines = cli.succeed("predict", *models, photos, "--precision", "float32").out.splitlines()
    assert list(map(json.loads, lines)) == [each.to_dict() for each in together]
    assert "is a model; name images after it" in cli.fail("predict", *models)

    # evaluated, they are the same
    out = tmp_path / "out"
    arguments = ("--data", photos, "--num-examples", "0", "--precision", "float32", "-o", out)
    cli.succeed("evaluate", *models, *arguments)
    labels = [Path(each.path).parent.name for each in together]
    correct = [each.predicted == label for each, label in zip(together, labels, strict=True)]
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert evaluation["metrics"]["top1"] == np.mean(correct)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"class_names": ("ant", "bee", "dog")}, r"class_names is .*cow.* and .*dog"),
        ({"class_names": NAMES[::-1]}, "class_names is"),
        ({"preprocess": Preprocess((24, 24)), "img_size": 24}, r"preprocess is .*24, 24"),
        ({"data": {"task": "multilabel"}}, "is_multilabel is False and True"),
    ],
)
def test_models_that_differ_are_refused(
    models: list[Path],
    photos: Path,
    save_model: SaveModel,
    tmp_path: Path,
    other: dict[str, Any],
    message: str,
) -> None:
    path = save_model(tmp_path / "other.safetensors", **({"class_names": NAMES} | other))
    with pytest.raises(ValueError, match=rf"can't be averaged: {message}"):
        vit.predict([models[0], path], photos)
    with pytest.raises(ValueError, match="features of AveragedModel are unknown"):
        vit.embed(models, photos)


def test_labels_are_averaged_and_explained(
    save_model: SaveModel, photos: Path, tmp_path: Path
) -> None:
    """An average is a module like any other: what takes a model takes it."""
    models = [
        save_model(
            tmp_path / f"{depth}.safetensors",
            class_names=NAMES,
            depth=depth,
            data={"task": "multilabel"},
        )
        for depth in (1, 2)
    ]
    paths = sorted(photos.rglob("*.png"))[:3]
    alone = [read(vit.predict(each, paths, precision="float32").predictions) for each in models]
    together = read(vit.predict(models, paths, precision="float32").predictions)
    assert together == pytest.approx((alone[0] + alone[1]) / 2, abs=1e-6)
    bundle = open_model(models)
    logits = bundle.model(bundle.preprocess([Image.open(path) for path in paths]))
    assert logits.sigmoid().detach().numpy() == pytest.approx(together, abs=1e-6)
    explained = vit.explain(models, paths[:1], device="cpu")
    # evidence for a class of the average, whose attention is that of no single model
    assert explained.methods[0].startswith("libra")
    assert len(explained.images[0].maps) >= 1
