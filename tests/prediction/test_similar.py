"""The training images that are most like an image, by the cosine of their features."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vit
from tests.conftest import Launcher, SaveModel
from vit.bundle import load_bundle
from vit.model.model_file import Likeness
from vit.prediction.neighbours import check_similar, find_similar
from vit.training.result import TrainingResult

NUM_PHOTOS = 24


def test_cosines_worked_by_hand(save_model: SaveModel, tmp_path: Path) -> None:
    bundle = load_bundle(save_model(tmp_path / "model.safetensors"))
    names = [["cat/1.png", 0], ["dog/1.png", 1], ["dog/2.png", 1]]
    training = np.array([[1, 0], [0, 1], [0.6, 0.8]], dtype=np.float16)
    likeness = Likeness(training, np.array([0.1], dtype=np.float32))
    conformal = {"num_images": 0, "thresholds": {}, "training_images": names}
    bundle = replace(
        bundle, metadata={**bundle.metadata, "conformal": conformal}, likeness=likeness
    )
    # the length of a feature doesn't count
    ((first, second),) = find_similar(bundle, np.array([[0, 5]], dtype=np.float32), 2)
    assert (first.path, first.class_name) == ("dog/1.png", bundle.class_names[1])
    assert first.similarity == pytest.approx(1)
    assert second.path == "dog/2.png"
    assert second.similarity == pytest.approx(0.8, abs=1e-3)


def train_on_photos(tmp_path: Path, *, max_training_features: int) -> TrainingResult:
    rng = np.random.default_rng(0)
    photos = tmp_path / "photos"
    for number in range(NUM_PHOTOS):
        path = photos / ("cat", "dog")[number % 2] / f"{number} é.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    architecture = ["patch_size=4", "embed_dim=16", "depth=1", "num_heads=1"]
    config = {"data": {"name": "folder", "root": str(photos), "validation_fraction": 0.25}}
    overrides = [f"model.{setting}" for setting in architecture]
    overrides += ["data.image_size=8", "train.epochs=1", "train.batch_size=6", "train.device=cpu"]
    overrides += [f"train.max_training_features={max_training_features}"]
    return vit.train(config, output=tmp_path / "run", overrides=overrides)


def test_a_training_photo_is_most_like_itself(cli: Launcher, tmp_path: Path) -> None:
    run = train_on_photos(tmp_path, max_training_features=10)
    photos = tmp_path / "photos"
    recorded = run.bundle.metadata["conformal"]["training_images"]
    assert [label for _, label in recorded].count(0) == 5
    assert len(recorded) == 10

    for name, label in recorded[:2] + recorded[-2:]:
        result = vit.predict(run.bundle, photos / name, similar=3, device="cpu")
        first, second, _ = result.predictions[0].similar or []
        assert first.path == name
        assert first.class_name == run.bundle.class_names[label]
        assert first.similarity == pytest.approx(1, abs=2e-3)
        assert second.similarity <= first.similarity

    photo = photos / recorded[0][0]
    outcome = cli.succeed("predict", tmp_path / "run", photo, "--similar", "2")
    (line,) = outcome.out.splitlines()
    similar = json.loads(line)["similar"]
    assert [set(row) for row in similar] == [{"path", "class", "similarity"}] * 2
    assert similar[0]["path"] == recorded[0][0]


def test_names_and_features_are_left_out(tmp_path: Path) -> None:
    run = train_on_photos(tmp_path, max_training_features=0)
    assert run.bundle.likeness is None
    assert "training_images" not in run.bundle.metadata["conformal"]
    with pytest.raises(ValueError, match=r"no training images: train\.max_training_features is 0"):
        check_similar(run.bundle)


def test_what_cannot_be_answered_says_why(
    cli: Launcher, save_model: SaveModel, tmp_path: Path
) -> None:
    model = save_model(tmp_path / "model.safetensors")
    photo = tmp_path / "photo.png"
    Image.new("RGB", (20, 20)).save(photo)
    with pytest.raises(ValueError, match=r"names no training images: `vit train` writes them into"):
        vit.predict(model, photo, similar=1, device="cpu")
    assert vit.predict(model, photo, device="cpu").predictions[0].similar is None
    error = cli.fail("predict", model, photo, "--similar", "1", "--format", "csv")
    assert "--similar needs --format jsonl" in error
