"""What a program gives to `vit.train`: images, a transform, a model, callbacks."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import albumentations as A
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import v2

import vit
from tests.conftest import Launcher
from vit.config import load_config
from vit.evaluation.calibration import fit_temperature
from vit.prediction.batch_predictor import BatchPredictor, read_from
from vit.prediction.neighbours import compute_distances
from vit.training.data import build_data, build_dataset, build_train_loader

CONFIG: dict[str, Any] = {
    "data": {"image_size": 8},
    "model": {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2},
    "train": {
        "epochs": 2,
        "batch_size": 16,
        "device": "cpu",
        "precision": "float32",
    },
}
NAMES = ("red", "green", "blue")
Arrays = tuple[np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    """Noise that is brighter in the channel of its class."""
    random, labels = np.random.default_rng(0), np.arange(90) % 3
    images = random.integers(0, 120, (90, 12, 12, 3), dtype=np.uint8)
    images[np.arange(90), :, :, labels] += 100
    return images, labels


@pytest.fixture(scope="module")
def plain(arrays: Arrays, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of these images with nothing else from Python."""
    return vit.train(CONFIG, output=tmp_path_factory.mktemp("runs") / "plain", dataset=arrays)


class Colours(torch.utils.data.Dataset[tuple[Any, int]]):
    def __init__(self, arrays: Arrays, classes: tuple[str, ...] = NAMES) -> None:
        self.arrays, self.classes = arrays, classes

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return Image.fromarray(self.arrays[0][index]), int(self.arrays[1][index])


def weights(result: Any) -> dict[str, Tensor]:
    return dict(result.bundle.model.state_dict())


def same(first: Any, second: Any) -> bool:
    one, other = weights(first), weights(second)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- images
# ------------------------------------------------------------------------------------------------


def test_a_dictionary_is_training_and_validation_images(arrays: Arrays, tmp_path: Path) -> None:
    images, labels = arrays
    sets = {"train": (images[:60], labels[:60]), "validation": (images[60:], labels[60:])}
    result = vit.train(CONFIG, output=tmp_path / "run", dataset=sets)
    splits = result.bundle.data["splits"]
    assert {name: split["num_images"] for name, split in splits.items()} == {
        "train": 60,
        "validation": 30,
    }
    # what the model says of its doubt is of the images that were held out
    bundle = result.bundle
    pixels = [bundle.preprocess.to_uint8(Image.fromarray(image)) for image in images[60:]]
    predictor = BatchPredictor.from_bundle(bundle)
    logits, features = predictor.predict_with_features(read_from(pixels), count=30)
    temperature = fit_temperature(logits, labels[60:])
    assert bundle.metadata["temperature"] == pytest.approx(temperature, rel=1e-3)
    training, distances = bundle.likeness
    assert len(training) == 60
    assert distances == pytest.approx(compute_distances(features, training), abs=1e-4)
    other = Colours(arrays)
    other.classes = NAMES[::-1]
    sets = {"train": Colours(arrays), "validation": other}
    with pytest.raises(ValueError, match="different classes; pass class_names"):
        vit.train(CONFIG, output=tmp_path / "other", dataset=sets)


def test_a_given_data_set_is_needed_again(
    arrays: Arrays, plain: Any, tmp_path: Path, cli: Launcher
) -> None:
    run = shutil.copytree(plain.directory, tmp_path / "run")
    assert same(plain, vit.train(output=run, resume=True, dataset=arrays))
    assert "were passed from Python" in cli.fail("train", "--resume", "--output", run)
    assert "were passed from Python" in cli.fail(
        "evaluate", run, "--output", tmp_path / "evaluation"
    )
    other = (255 - arrays[0], arrays[1])
    with pytest.raises(ValueError, match="the fingerprint of the training images is"):
        vit.train(output=run, resume=True, dataset=other)


# --- transform
# ---------------------------------------------------------------------------------------------


def jitter(pixels: np.ndarray) -> np.ndarray:
    return np.clip(pixels + np.random.normal(0, 20, pixels.shape), 0, 255).astype(np.uint8)  # noqa: NPY002


TRANSFORMS = {
    "albumentations": A.Compose([A.RandomCrop(7, 7), A.HorizontalFlip(), A.GaussNoise(p=1)]),
    "torchvision": v2.Compose([v2.RandomResizedCrop(7), v2.ColorJitter(0.5), v2.PILToTensor()]),
    "callable": jitter,
}


def batches(
    arrays: Arrays, transform: Any, *overrides: str, epoch: int = 0, **options: Any
) -> Tensor:
    config = load_config(CONFIG, [*overrides, "data.name=from-python"])
    data = build_data(
        config,
        build_dataset(config, user_dataset=arrays),
        device=torch.device("cpu"),
        has_transform=transform is not None,
    )
    loader = build_train_loader(data, device=torch.device("cpu"), transform=transform)
    return torch.cat([batch.images for batch in loader.epoch(epoch, **options)])


@pytest.mark.parametrize(
    "transform",
    [
        A.Compose([A.ToFloat()]),
        v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32)]),
        lambda pixels: None,
    ],
)
def test_a_transform_that_gives_no_image_is_refused(arrays: Arrays, transform: Any) -> None:
    with pytest.raises(ValueError, match=r"the transform gives .*, not uint8 \[H, W, 3\]"):
        batches(arrays, transform)


class StopAfter(vit.Observer):
    """Asks to stop after a step, in or at the end of its epoch."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, metrics: Any) -> bool:
        return bool(metrics["step"] == self.step)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_each_kind_of_transform_gives_the_same_batches_again(arrays: Arrays, name: str) -> None:
    transform = TRANSFORMS[name]
    whole = batches(arrays, transform, "data.workers=0", epoch=1)
    assert torch.equal(
        batches(arrays, transform, "data.workers=0", epoch=1, start_step=2), whole[32:]
    )
    assert not torch.equal(batches(arrays, transform, "data.workers=0", epoch=2), whole)


def test_a_run_with_a_transform_resumes_bit_for_bit(arrays: Arrays, tmp_path: Path) -> None:
    given = {"dataset": arrays, "transform": jitter}
    whole = vit.train(CONFIG, output=tmp_path / "whole", **given)
    stopped = vit.train(CONFIG, output=tmp_path / "run", **given, callbacks=[StopAfter(7)])
    assert (stopped.steps, whole.steps) == (7, 10)
    assert not same(stopped, whole)
    resumed = vit.train(CONFIG, output=tmp_path / "run", resume=True, **given)
    assert same(whole, resumed)
    clocks = {"images_per_second", "elapsed_seconds"}
    lines = [
        [{k: v for k, v in row.items() if k not in clocks} for row in run.metrics]
        for run in (whole, resumed)
    ]
    assert lines[0] == lines[1]


def test_a_run_with_another_transform_is_not_resumed(arrays: Arrays, tmp_path: Path) -> None:
    given = {"output": tmp_path / "run", "dataset": arrays}
    vit.train(CONFIG, **given, transform=jitter, callbacks=[StopAfter(1)])
    with pytest.raises(ValueError, match=r"the argument transform is .* there, .* here"):
        vit.train(CONFIG, **given, resume=True, transform=A.VerticalFlip())
    with pytest.raises(ValueError, match=r"the argument transform is .* there, None here"):
        vit.train(CONFIG, **given, resume=True)


# --- model
# -------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        )
        self.head = nn.Linear(8, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(images).flatten(1))


def test_any_module_trains_resumes_and_is_loaded_into_a_module(
    arrays: Arrays, tmp_path: Path, cli: Launcher
) -> None:
    def train(output: str, **options: Any) -> Any:
        torch.manual_seed(0)
        overrides = ["train.ema_decay=0.9", "data.image_size=9"]  # no multiple of our patches
        given = {"dataset": arrays, "model": Small(), "class_names": NAMES}
        return vit.train(CONFIG, output=tmp_path / output, overrides=overrides, **given, **options)

    whole, stopped = train("whole"), train("run", callbacks=[StopAfter(7)])
    assert not same(whole, stopped)
    assert same(whole, train("run", resume=True))

    path = whole.model_path
    Image.new("RGB", (9, 9)).save(tmp_path / "black.png")
    for refused in (
        cli.fail("predict", path, tmp_path / "black.png"),
        cli.fail("train", "--resume", "--output", tmp_path / "run"),
    ):
        assert (
            "Small can't be built from its file alone" in refused
            or "were passed from Python" in refused
        )
    loaded = vit.load_bundle(path, model=Small())
    assert loaded.class_names == NAMES
    answers = [
        vit.predict(bundle, arrays[0][0]).predictions[0].classes
        for bundle in (loaded, whole.bundle)
    ]
    assert answers[0] == answers[1]
    with pytest.raises(ValueError, match=r"does not fit this model in .*head\.weight"):
        vit.load_bundle(path, model=Small(4))
    with pytest.raises(ValueError, match="the model of this run was passed from Python"):
        vit.train(output=tmp_path / "whole", resume=True, dataset=arrays)


def test_a_models_logits_must_be_of_the_classes(arrays: Arrays, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Small makes \[2, 5\] of images .*, not logits \[2, 3\]"):
        vit.train(CONFIG, output=tmp_path / "run", dataset=arrays, model=Small(5))
    overrides = ["train.patch_drop_rates=[[1, 0.5]]"]
    with pytest.raises(
        ValueError, match=r"train\.patch_drop_rates is for vit's own models, and Small is not one"
    ):
        vit.train(
            CONFIG, output=tmp_path / "run", overrides=overrides, dataset=arrays, model=Small()
        )


# --- callbacks
# ---------------------------------------------------------------------------------------------


class Recorder(vit.Observer):
    def __init__(self, *, patience: int | None = None) -> None:
        self.events: list[Any] = []
        self.said: list[str] = []
        self.patience = patience

    def on_start(self, *, step: int, total_steps: int, settings: Any) -> None:
        self.events.append(("start", step, total_steps, settings["train.batch_size"]))

    def on_step(self, metrics: Any) -> None:
        assert {"loss", "top1", "gradient_norm", "learning_rate", "images_per_second"} < set(
            metrics
        )
        self.events.append(("step", metrics["epoch"], metrics["step"], metrics["loss"] > 0))

    def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> bool:
        assert not model.training
        self.events.append(("epoch", metrics["epoch"], metrics["val_top1"] is not None))
        return self.patience == metrics["epoch"]

    def on_message(self, text: str) -> None:
        self.said.append(text)

    def on_end(self) -> None:
        self.events.append("end")


def test_a_callback_sees_start_every_step_epochs_and_the_end(
    arrays: Arrays, plain: Any, tmp_path: Path
) -> None:
    seen = Recorder()
    result = vit.train(CONFIG, output=tmp_path / "run", dataset=arrays, callbacks=[seen])
    steps = [("step", 1 + number // 5, number + 1, True) for number in range(10)]
    start, epochs = ("start", 0, 10, 16), [("epoch", number, True) for number in (1, 2)]
    assert seen.events == [start, *steps[:5], epochs[0], *steps[5:], epochs[1], "end"]
    assert same(plain, result)
    assert len(result.metrics) == 2  # the default ones are there too
    assert (tmp_path / "run" / "tensorboard").is_dir()


def test_a_callback_ends_a_run_that_can_be_resumed(
    arrays: Arrays, plain: Any, tmp_path: Path
) -> None:
    seen = Recorder(patience=1)
    result = vit.train(CONFIG, output=tmp_path / "run", dataset=arrays, callbacks=[seen])
    assert (result.steps, seen.events[-1]) == (5, "end")
    assert len(seen.said) == 1
    assert seen.said[0].startswith("stopped after step 5; continue with --resume --output ")
    assert result.best_top1 == plain.metrics[0]["val_top1"]
    assert same(plain, vit.train(CONFIG, output=tmp_path / "run", dataset=arrays, resume=True))
    early = vit.train(CONFIG, output=tmp_path / "early", dataset=arrays, callbacks=[StopAfter(2)])
    assert (early.steps, early.best_top1) == (2, None)
    assert (
        len(vit.predict(early.bundle, arrays[0][:2]).predictions) == 2
    )  # not evaluated yet, and there


def test_a_given_loss_is_trained_and_nothing_else(arrays: Arrays, tmp_path: Path) -> None:
    def train(name: str, sign: int) -> Any:
        given = {"dataset": arrays, "loss": lambda *pair: sign * F.cross_entropy(*pair)}
        return vit.train(CONFIG, output=tmp_path / name, **given)

    overrides = {"train.label_smoothing": 0}
    usual = vit.train(CONFIG, output=tmp_path / "usual", dataset=arrays, overrides=overrides)
    assert same(train("given", 1), usual)
    first, last = train("negative", -1).metrics
    assert 0 > first["train_loss"] > last["train_loss"]
    # validation measures the cross-entropy
    assert 0 < first["val_loss"] < last["val_loss"]


def test_without_validation_the_last_model_is_kept(arrays: Arrays, tmp_path: Path) -> None:
    given = {"dataset": arrays, "overrides": {"data.validation_fraction": 0}}
    result = vit.train(CONFIG, output=tmp_path, **given)
    assert (result.best_top1, result.num_validation, result.steps) == (None, 0, 10)
    assert [row["val_top1"] for row in result.metrics] == [None, None]
    # nothing held out tells how sure the model may be
    assert "temperature" not in result.bundle.metadata
    (prediction,) = vit.predict(result.bundle, arrays[0][0]).predictions
    assert prediction.p_value is None


def test_a_module_keeps_the_weights_of_its_last_step(arrays: Arrays, tmp_path: Path) -> None:
    class Keep(vit.Observer):
        def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> None:
            self.last = [value.clone() for value in model.state_dict().values()]

    module, keep = nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), Keep()
    vit.train(CONFIG, output=tmp_path, dataset=arrays, model=module, callbacks=[keep])
    assert all(map(torch.equal, module.state_dict().values(), keep.last))


# --- what a run of images from Python is used for
# ------------------------------------------------------------------------------------------------


def test_a_run_is_evaluated_and_explained_on_what_was_held_out(plain: Any) -> None:
    result = vit.evaluate(plain.bundle)
    assert (result.evaluation.split, result.evaluation.num_images) == ("validation", 9)
    assert result.evaluation.metrics["top1"] == plain.best_top1
    assert any("chose the model by these images" in note for note in result.evaluation.notes)
    assert vit.explain(plain.bundle, num_images=2, checks=False).maps["rollout"].shape[0] == 2
    options = {"methods": "rollout", "num_images": 8}
    faithfulness = vit.measure_faithfulness(plain.bundle, split="train", **options)
    assert faithfulness.conditions["split"] == "train"
    # without the images in memory, they have to be passed again
    with pytest.raises(ValueError, match=r"passed from Python; pass them as dataset=…"):
        vit.evaluate(plain.directory)
    with pytest.raises(ValueError, match="--split test"):
        vit.evaluate(plain.bundle, operating_point="class 1:f1")


def a_function(metrics: Any) -> None:
    pass


# name → (function that is called, arguments from the run and the arrays, sentence)
MISTAKES: dict[str, tuple[Callable[[Any, Arrays, Path], Any], str]] = {
    "a result as model": (
        lambda r, a, p: vit.evaluate(r),
        r"model is of the type TrainingResult, .* the \.bundle of a run",
    ),
    "a class as model": (lambda r, a, p: vit.predict(Small, a[0]), "model is of the type type"),
    "a data set as data": (
        lambda r, a, p: vit.evaluate(r.bundle, data=Colours(a)),
        "data is of the type Colours, .*dataset=…",
    ),
    "both": (
        lambda r, a, p: vit.evaluate(r.bundle, data="digits", dataset=a),
        "are for folders and tables, not for dataset",
    ),
    "no batch": (
        lambda r, a, p: vit.evaluate(r.bundle, batch_size=0),
        "batch_size 0 must be at least 1",
    ),
    "a function as callback": (
        lambda r, a, p: vit.train(CONFIG, output=p, dataset=a, callbacks=[a_function]),
        "a callback is of the type function",
    ),
    "a class as callback": (
        lambda r, a, p: vit.train(CONFIG, output=p, dataset=a, callbacks=[vit.Observer]),
        "a callback is of the type type",
    ),
    "a model of another size": (
        lambda r, a, p: vit.train(
            CONFIG, output=p, dataset=a, model=timm.create_model("test_vit", num_classes=3)
        ),
        r"does not take images \[2, 3, 8, 8\] \(Input height .*set data\.image_size",
    ),
    "other classes in a part": (
        lambda r, a, p: vit.train(
            CONFIG, output=p, dataset={"train": Colours(a), "val": Colours(a, NAMES[::-1])}
        ),
        "different classes; pass class_names",
    ),
    "no pairs": (
        lambda r, a, p: vit.train(CONFIG, output=p, dataset=[3, 4]),
        r"item 0 of dataset is of the type int, not a pair \(image, label\)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence(plain: Any, arrays: Arrays, tmp_path: Path, name: str) -> None:
    call, sentence = MISTAKES[name]
    with pytest.raises(ValueError, match=sentence) as error:
        call(plain, arrays, tmp_path / "run")
    assert len(str(error.value).splitlines()) == 1


def test_folds_of_a_run_are_trained_as_it_is_configured(arrays: Arrays, tmp_path: Path) -> None:
    def train(name: str, **options: Any) -> np.ndarray:
        run = vit.train(CONFIG, output=tmp_path / name, dataset=arrays, folds=3, **options)
        # the model of the run has seen all images
        assert run.bundle.data["splits"]["train"]["num_images"] == 90
        found = np.load(tmp_path / name / "predictions.npz")
        # two epochs of one block tell most colours
        assert (found["labels"] == found["predicted"]).mean() > 0.5
        return found["logits"]

    logits = train("whole")
    assert len(logits) == 90

    # of a run that was stopped, a fold that is lost is trained again
    train("parts", callbacks=[StopAfter(1)])
    shutil.rmtree(tmp_path / "parts" / "folds" / "2")
    assert np.array_equal(train("parts", resume=True), logits)
    assert not (tmp_path / "parts" / "folds").exists()
