"""A run of pretrained weights starts from a probe: a model like any other, never lost again."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tests.conftest import BuildOnce, Launcher, SaveModel
from vit.bundle import load_bundle
from vit.config import Config
from vit.data.cache import decode_dataset
from vit.data.dataset import ImageRule
from vit.data.open import open_dataset
from vit.data.preprocess import Preprocess
from vit.model.model_file import read_model_file, write_model_file
from vit.prediction.batch_predictor import BatchPredictor, compute_features
from vit.training.automatic import choose_config
from vit.training.folds import assign_folds
from vit.training.linear_probe import fit_probe
from vit.training.trainer import Trainer

SHORT = [
    "data.classes=[0,1,2]",
    "data.image_size=8",
    "data.crop_pct=1",
    "train.device=cpu",
    "train.precision=float32",
]
FINE_TUNED = ["train.epochs=2", "train.max_steps=6", "train.batch_size=32", "optimizer.lr=1e-3"]


@pytest.fixture(scope="module")
def weights(build_once: BuildOnce, save_model: SaveModel) -> Path:
    """A model of three blocks, of other classes, whose features are random."""
    sizes = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 3, "num_heads": 2}
    preprocess = Preprocess((8, 8))

    def build(folder: Path) -> None:
        path = save_model(folder / "model.safetensors", preprocess=preprocess, **sizes)
        content = read_model_file(path)
        # images that differ more than their features' means are large, as with trained weights
        content.weights["patch_embed.proj.weight"] *= 10
        write_model_file(path, content)

    return build_once("probe_weights", build) / "model.safetensors"


@pytest.fixture(scope="module")
def probe_alone(build_once: BuildOnce, cli: Launcher, weights: Path) -> Path:
    def build(folder: Path) -> None:
        outcome = cli.succeed(
            "train", "folder/finetune", "data.name=digits", "model.freeze=backbone", *SHORT,
            "--init", weights, "-o", folder,
        )  # fmt: skip
        assert "linear probe only" in outcome.text
        assert "top-1 in cross-validation" in outcome.text
        assert "With twice as many photos (774)" in " ".join(outcome.text.split())

    return build_once("probe_alone", build)


def test_the_model_file_gives_scikit_learns_probabilities(weights: Path, probe_alone: Path) -> None:
    splits = open_dataset("digits", rule=ImageRule(classes=["0", "1", "2"]))
    train, test = (
        decode_dataset(splits.split(name), Preprocess((8, 8))) for name in ("train", "test")
    )
    predictor = BatchPredictor.from_bundle(load_bundle(weights), precision="float32")
    features, test_features = compute_features(predictor, train), compute_features(predictor, test)
    probe = fit_probe(features, train.labels, assign_folds(train.labels), num_classes=3)
    bundle = load_bundle(probe_alone)
    assert (len(bundle.model.blocks), bundle.model.global_pool) == probe.readout

    regression = LogisticRegression(C=probe.strength, max_iter=1000)
    classifier = make_pipeline(StandardScaler(), regression)
    classifier.fit(features[probe.readout].double().numpy(), train.labels)
    inputs = bundle.preprocess.normalize(torch.from_numpy(np.array(test.pixels)))
    with torch.inference_mode():
        logits = bundle.model(inputs).double().numpy()
    expected = classifier.predict_proba(test_features[probe.readout].double().numpy())
    # float32 rounds the features of two passes apart by more than the head does
    assert np.abs(softmax(logits, axis=1) - expected).max() < 1e-5
    # of three classes, with features that were never trained
    assert (logits.argmax(axis=1) == test.labels).mean() > 0.7


def test_a_resumed_probe_gives_the_same_file(cli: Launcher, probe_alone: Path) -> None:
    assert not (probe_alone / "metrics.jsonl").exists()
    curve = json.loads((probe_alone / "learning_curve.json").read_text())
    assert curve["forecast"]["num_images"] == 774
    model_file = (probe_alone / "model.safetensors").read_bytes()
    resumed = cli.succeed("train", "-o", probe_alone, "--resume")
    assert "resuming after step 0 of 0" in resumed.text
    # the features of the training images, which the probe had, are those that the file's model gives
    assert (probe_alone / "model.safetensors").read_bytes() == model_file


def test_fine_tuning_never_ends_below_it(
    cli: Launcher, weights: Path, probe_alone: Path, tmp_path: Path
) -> None:
    start = ["train", "folder/finetune", "data.name=digits", *SHORT, *FINE_TUNED, "--init", weights]
    spoilt = tmp_path / "spoilt"
    # at such a rate each step spoils the model
    cli.succeed(*start, "optimizer.lr=10", "schedule.warmup_epochs=0", "-o", spoilt)

    probe = load_bundle(probe_alone).model.state_dict()
    kept = load_bundle(spoilt).model.state_dict()
    assert all(torch.equal(probe[name], kept[name]) for name in probe)
    assert load_bundle(spoilt).metadata["run_id"] != load_bundle(probe_alone).metadata["run_id"]
    # the probe's features go with it, and a resumed run computes the same ones
    of_probe = read_model_file(probe_alone / "model.safetensors").likeness
    content = (spoilt / "model.safetensors").read_bytes()
    of_kept = read_model_file(spoilt / "model.safetensors").likeness
    assert of_probe is not None
    assert of_kept is not None
    assert all(np.array_equal(*pair) for pair in zip(of_probe, of_kept, strict=True))
    cli.succeed("train", "-o", spoilt, "--resume")
    assert (spoilt / "model.safetensors").read_bytes() == content


@pytest.mark.extended
def test_a_resumed_run_ends_with_the_same_bytes(
    cli: Launcher, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ["train", "folder/finetune", "data.name=digits", *SHORT, *FINE_TUNED, "--init", weights]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    cli.succeed(*start, "-o", whole)

    # killed before the first step
    def fail(trainer: Trainer) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_epoch", fail)
        assert cli.run(*start, "-o", parts).code != 0
    assert [path.name[:13] for path in (parts / "checkpoints").iterdir()] == ["step-00000000"]
    # neither the cache nor the weights are needed any more
    monkeypatch.setenv("VIT_CACHE", str(tmp_path / "other_cache"))
    cli.succeed("train", "-o", parts, "--resume")
    for name in ("model.safetensors", "config.yaml"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()

    # a model file that is lost is written again
    (parts / "model.safetensors").unlink()
    cli.succeed("train", "-o", parts, "--resume")
    assert (parts / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_fewer_than_20_validation_images_choose_no_fine_tuned_model(
    weights: Path,
) -> None:
    def choose(*overrides: str) -> tuple[Config, dict[str, str]]:
        given = ["data.classes=[0,1,2]", f"model.init={weights}", "train.device=cpu", *overrides]
        config, reasons, _ = choose_config("digits", given)
        return config, reasons

    # of 430 images
    config, reasons = choose("data.validation_fraction=0.04")
    assert config.model.freeze == "backbone"
    assert "validation images can't tell" in reasons["run"]
    for enough in ("data.validation_fraction=0.05", "data.validation_fraction=0"):
        assert choose(enough)[0].model.freeze == "none"
    # who says how long, or which blocks, wants it
    config, _ = choose("data.validation_fraction=0.04", "train.epochs=3")
    assert config.model.freeze == "none"
    config, _ = choose("data.validation_fraction=0.04", "model.freeze=1")
    assert config.model.freeze == 1
    assert config.train.max_minutes is not None


@pytest.mark.extended
def test_folds_predict_every_image_and_the_model_is_fitted_on_all(
    cli: Launcher, weights: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    outcome = cli.succeed(
        "train", "folder/finetune", "data.name=digits", *SHORT, "--init", weights, "--folds", "4",
        "-o", run,
    )  # fmt: skip
    text = " ".join(outcome.text.split())
    result = np.load(run / "predictions.npz")
    assert len(set(result["ids"].tolist())) == 537
    bundle = load_bundle(run)
    assert bundle.data["splits"]["train"]["num_images"] == 537
    # a report of the out-of-fold predictions, as of a test split
    cli.succeed("evaluate", run, "-o", tmp_path / "evaluation")
    evaluation = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert evaluation["split"] == "cross-validation"
    assert "4-fold cross-validation of 537 images; vit evaluate" in text
    # no image is left that it hasn't seen
    failure = cli.run("evaluate", run, "--split", "test", "-o", tmp_path / "test")
    assert "the test split is empty" in failure.err
