"""Images, models and callbacks from Python: a run is trained, evaluated, measured and explained on
what was passed, and what is of the wrong kind is one sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import v2

import vit
from vit.training.result import TrainingResult

CONFIG: dict[str, Any] = {
    "data": {"image_size": 8},
    "model": {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2},
    "optimizer": {"lr": 3e-3},
    "train": {
        "epochs": 2,
        "batch_size": 16,
        "device": "cpu",
        "precision": "float32",
    },
}
NAMES = ("red", "green", "blue")
Arrays = tuple[np.ndarray, np.ndarray]


class Colours(torch.utils.data.Dataset[tuple[Any, Any]]):
    """Images and labels, each converted."""

    def __init__(
        self,
        arrays: Arrays,
        convert: Callable[[np.ndarray], Any] = Image.fromarray,
        label: Callable[[int], Any] = int,
    ) -> None:
        self.arrays, self.convert, self.label = arrays, convert, label

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        images, labels = self.arrays
        return self.convert(images[index]), self.label(labels[index])


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    """Noise that is brighter in the channel of its class."""
    random, labels = np.random.default_rng(0), np.arange(90) % 3
    images = random.integers(0, 120, (90, 12, 12, 3), dtype=np.uint8)
    images[np.arange(90), :, :, labels] += 60
    return images, labels


@pytest.fixture(scope="module")
def others() -> Arrays:
    random, labels = np.random.default_rng(1), np.arange(30) % 3
    images = random.integers(0, 180, (30, 12, 12, 3), dtype=np.uint8)
    return images, labels


@pytest.fixture(scope="module")
def run(arrays: Arrays, tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    output = tmp_path_factory.mktemp("python") / "run"
    return vit.train(CONFIG, output=output, dataset=arrays, class_names=NAMES)


def test_a_run_is_evaluated_and_explained_on_what_was_held_out(
    run: TrainingResult, arrays: Arrays
) -> None:
    result = vit.evaluate(run.bundle)
    assert (result.evaluation.split, result.evaluation.num_images) == ("validation", 9)
    assert result.evaluation.metrics["top1"] == run.best_top1
    assert any("chose the model by these images" in note for note in result.evaluation.notes)
    assert vit.explain(run.bundle, num_images=2, checks=False).maps["rollout"].shape[0] == 2
    faithfulness = vit.measure_faithfulness(
        run.bundle, split="train", methods="rollout", num_images=8
    )
    assert faithfulness.conditions["split"] == "train"
    # without the images in memory, they have to be passed again
    with pytest.raises(ValueError, match=r"passed from Python; pass them as dataset=…"):
        vit.evaluate(run.directory)
    with pytest.raises(ValueError, match="--split test"):
        vit.evaluate(run.bundle, operating_point="red:f1")


def test_images_of_every_form_give_one_evaluation(run: TrainingResult, others: Arrays) -> None:
    images, labels = others
    channels_first = torch.from_numpy(images).permute(0, 3, 1, 2)
    to_tensor = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    forms = {
        "arrays": others,
        "tensors": (channels_first, torch.from_numpy(labels)),
        "ToTensor": Colours(others, to_tensor),
        "PILToTensor": Colours(others, lambda pixels: v2.functional.pil_to_tensor(Image.fromarray(pixels))),
        "names": Colours(others, label=NAMES.__getitem__),
        "a list": list(zip(images, labels.tolist(), strict=True)),
    }  # fmt: skip
    results = {name: vit.evaluate(run.bundle, dataset=form) for name, form in forms.items()}
    expected = vit.predict(run.bundle, images, top_k=1).predictions
    correct = [
        int(item.classes[0][0] == label) for item, label in zip(expected, labels, strict=True)
    ]
    for name, result in results.items():
        evaluation = result.evaluation
        assert evaluation.metrics["top1"] == pytest.approx(np.mean(correct)), name
        assert evaluation.split == "test"
        assert evaluation.fingerprint == results["arrays"].evaluation.fingerprint, name
    # a set that the model saw is told from one that it didn't
    assert results["arrays"].evaluation.duplicates_of_training is not None
    assert results["arrays"].evaluation.duplicates_of_training.exact == 0

    measured = vit.measure_faithfulness(
        run.directory, dataset=others, methods="rollout", num_images=8
    )
    assert measured.conditions["data"] == "from-python"


class Small(nn.Module):
    pass


def a_function(metrics: Any) -> None:
    pass


# name → (function that is called, arguments from the run and the arrays, sentence)
MISTAKES: dict[str, tuple[Callable[[TrainingResult, Arrays, Path], Any], str]] = {
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
    "no pairs": (
        lambda r, a, p: vit.train(CONFIG, output=p, dataset=[3, 4]),
        r"item 0 of dataset is of the type int, not a pair \(image, label\)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence(
    run: TrainingResult, arrays: Arrays, tmp_path: Path, name: str
) -> None:
    call, sentence = MISTAKES[name]
    with pytest.raises(ValueError, match=sentence) as error:
        call(run, arrays, tmp_path / "run")
    assert len(str(error.value).splitlines()) == 1
