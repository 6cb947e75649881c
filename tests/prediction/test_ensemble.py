"""Several models: the mean of their probabilities, whatever their depth and the order of classes;
test-time augmentation, and predictions sorted by uncertainty."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vit
from tests.conftest import Launcher, SaveModel
from vit.bundle import load_bundle, open_model, update_metadata
from vit.data.preprocess import Preprocess
from vit.prediction.records import Prediction

NAMES = ("ant", "bee", "cow")


@pytest.fixture
def models(save_model: SaveModel, tmp_path: Path) -> list[Path]:
    """Two models of other depths, with the same classes in another order."""
    first = save_model(tmp_path / "a" / "model.safetensors", class_names=NAMES, depth=1)
    second = save_model(
        tmp_path / "b" / "model.safetensors",
        class_names=("cow", "ant", "bee"),
        depth=2,
        num_heads=2,
    )
    update_metadata(second, {"temperature": 1.5})
    return [first.parent, second]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Ten photos each of three classes, of odd sizes."""
    rng = np.random.default_rng(0)
    for name in NAMES:
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(10):
            pixels = rng.integers(0, 256, (20 + number, 31, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
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
    assert [each.classes[0][1] for each in together] == [NAMES[row.argmax()] for row in mean]
    assert together[0].p_value is None
    assert together[0].prediction_set is None

    # evaluated, they are the same
    path_of = {
        Path(each.path).relative_to(photos).as_posix(): row
        for each, row in zip(together, mean, strict=True)
    }
    out = tmp_path / "out"
    arguments = ("--data", photos, "--num-examples", "1", "--precision", "float32", "-o", out)
    screen = " ".join(cli.succeed("evaluate", *models, *arguments).text.split())
    assert "the mean probabilities of 2 models were measured" in screen
    with (out / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        written = [float(row[f"probability of {name}"]) for name in NAMES]
        assert written == pytest.approx(path_of[row["path"]], abs=1e-6)
    correct = [NAMES[path_of[row["path"]].argmax()] == row["label"] for row in rows]
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert evaluation["metrics"]["top1"] == np.mean(correct)
    parameters = [
        sum(weight.numel() for weight in load_bundle(model).model.parameters()) for model in models
    ]
    assert evaluation["cost"]["parameters"] == sum(parameters)
    with pytest.raises(ValueError, match="is not a model file, and the operating point"):
        vit.evaluate(models, data=photos, operating_point="bee:f1")

    # on the command line, models come before the photos
    lines = cli.succeed("predict", *models, photos, "--precision", "float32").out.splitlines()
    assert [json.loads(line)["predictions"] for line in lines] == [
        [
            {"index": index, "name": name, "probability": probability}
            for index, name, probability in each.classes
        ]
        for each in together
    ]
    assert "is a model; name images after it" in cli.fail("predict", *models)


def test_other_classes_and_features_are_refused(
    models: list[Path], photos: Path, save_model: SaveModel, tmp_path: Path
) -> None:
    other = save_model(tmp_path / "c.safetensors", class_names=("ant", "bee", "dog"))
    with pytest.raises(ValueError, match="have other classes: cow, dog in one of them"):
        vit.predict([models[0], other], photos)
    with pytest.raises(ValueError, match="gives no features to embed"):
        vit.predict(models, photos, embeddings=True)
    with pytest.raises(ValueError, match="unknown tta 'vflip'"):
        vit.predict(models, photos, tta="vflip")
    larger = save_model(
        tmp_path / "e.safetensors", preprocess=Preprocess((24, 24)), img_size=24, class_names=NAMES
    )
    with pytest.raises(ValueError, match=r"see images in another way .* of one preprocessing"):
        vit.predict([models[0], larger], photos)
    labels = save_model(tmp_path / "d.safetensors", data={"task": "multilabel"})
    with pytest.raises(ValueError, match="one class and several labels an image"):
        vit.predict([models[0], labels], photos)


def test_mirror_images_are_averaged(models: list[Path], photos: Path) -> None:
    paths = sorted(photos.rglob("*.png"))[:3]
    mirrored = [Image.open(path).transpose(Image.Transpose.FLIP_LEFT_RIGHT) for path in paths]
    plain, flipped = (
        np.log(read(vit.predict(models[0], list(images), precision="float32").predictions))
        for images in (paths, mirrored)
    )
    found = np.log(
        read(vit.predict(models[0], paths, tta="hflip", precision="float32").predictions)
    )
    # logarithms of probabilities are logits up to a number for each image
    mean = (plain + flipped) / 2
    mean -= np.log(np.exp(mean).sum(axis=1, keepdims=True))
    assert found == pytest.approx(mean, abs=2e-3)
    assert abs(found - plain).max() > 0.01


def test_labels_are_averaged_and_the_most_uncertain_comes_first(
    save_model: SaveModel, photos: Path, tmp_path: Path, cli: Launcher
) -> None:
    data = {"task": "multilabel"}
    models = [
        save_model(tmp_path / f"{name}.safetensors", data=data, depth=depth)
        for name, depth in (("a", 1), ("b", 2))
    ]
    alone = [read(vit.predict(model, photos, precision="float32").predictions) for model in models]
    mean = (alone[0] + alone[1]) / 2
    found = vit.predict(models, photos, precision="float32").predictions
    assert read(found) == pytest.approx(mean, abs=1e-6)
    # sorted: the label nearest to its threshold decides; what can't be read comes last
    (photos / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    update_metadata(
        models[0],
        {"operating_point": {"rule": "f1", "thresholds": {"bee": 0.3}, "num_images": 9}},
    )
    predictions = vit.predict(
        models[0], photos, sort="uncertainty", precision="float32"
    ).predictions
    assert predictions[-1].error is not None
    distances = abs(read(predictions[:-1]) - [0.5, 0.3, 0.5]).min(axis=1)
    assert (np.diff(distances) >= 0).all()
    assert len(set(distances)) > 20


@pytest.mark.parametrize("output_format", ["jsonl", "csv", "table"])
def test_classes_are_sorted_by_the_largest_probability(
    models: list[Path], photos: Path, cli: Launcher, output_format: str
) -> None:
    arguments = ("predict", models[1], photos, "--format", output_format, "--precision", "float32")
    lines = cli.succeed(*arguments, "--sort", "uncertainty").out.splitlines()
    others = cli.succeed(*arguments).out.splitlines()
    assert sorted(lines) == sorted(others)
    assert lines != others
    if output_format == "jsonl":
        largest = [json.loads(line)["predictions"][0]["probability"] for line in lines]
    elif output_format == "csv":
        largest = [float(row["probability"]) for row in csv.DictReader(lines)]
    else:
        largest = [float(line.split()[0]) for line in lines]
    assert len(largest) == 30
    assert largest == sorted(largest)


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
