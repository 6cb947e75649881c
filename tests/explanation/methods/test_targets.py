"""Targets beyond one softmax class: against finite differences in float64, and against a model whose
classifier was changed so that its one output is the target."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import vit
from tests.explanation.methods.test_removal import Gates
from tests.explanation.model_zoo import build_timm, prepare
from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.explanation.methods.maps import compute_maps
from vit.explanation.targets import build_target
from vit.model.logits import compute_logits

NAMES = ("cat", "dog", "owl", "a - b", "b")
EMBEDDING = torch.linspace(-1, 1, 24)
STEP = 1e-4
Number = Callable[[Tensor], Tensor]


def cosine(features: Tensor) -> Tensor:
    embedding = EMBEDDING.to(features)
    return (features @ embedding) / features.norm(dim=1) / embedding.norm()


# number of outputs, kind, target → what gradients explain, what removing patches is measured by
CASES: dict[str, tuple[int, str, Any, Number, Number]] = {
    "difference": (
        5,
        "classes",
        "owl - cat",
        lambda logits: logits[:, 2] - logits[:, 0],
        lambda logits: logits[:, 2] - logits[:, 0],
    ),
    "label": (
        5,
        "labels",
        "dog",
        lambda logits: logits[:, 1],
        lambda logits: 1 / (1 + (-logits[:, 1]).exp()),
    ),
    "number": (1, "numbers", "auto", lambda logits: logits[:, 0], lambda logits: logits[:, 0]),
    "function": (
        5,
        "classes",
        lambda logits: logits[:, 1] ** 2,
        lambda logits: logits[:, 1] ** 2,
        lambda logits: logits[:, 1] ** 2,
    ),
    "cosine": (0, "features", cosine, cosine, cosine),
}


def make(num_classes: int) -> tuple[nn.Module, Tensor]:
    model, images = prepare(build_timm(num_classes=num_classes), (64, 96))
    return model.double(), images.double()


def explain(
    model: nn.Module, images: Tensor, case: str, methods: list[str]
) -> tuple[Any, Tensor, Any]:
    count, kind, target, _, _ = CASES[case]
    record = build_target(target, NAMES[:count], kind)  # type: ignore[arg-type]
    return compute_maps(model, images, methods=methods, target=record)


@pytest.mark.parametrize("case", CASES)
def test_maps_are_derivatives_of_the_target(case: str) -> None:
    model, images = make(CASES[case][0])
    value = CASES[case][4]
    _, _, (maps,) = explain(model, images, case, ["removal-gradient"])
    removal = maps[:, 0].double()
    for row, column in ((0, 0), (2, 3), (3, 5)):
        gates = torch.zeros(len(images), 25, dtype=torch.float64)
        gates[:, 1 + 6 * row + column] = STEP
        with torch.no_grad():
            values = []
            for sign in (1, -1):
                with Gates(1 + sign * gates):
                    values.append(value(compute_logits(model, images)))
        expected = (values[0] - values[1]) / (2 * STEP)
        assert (removal[:, row, column] - expected).abs().max() < 1e-5 * removal.abs().max()


def explain_photo(num_classes: int, names: tuple[str, ...], **options: Any) -> Any:
    model, _ = prepare(build_timm(num_classes=num_classes), (64, 96))
    bundle = Bundle.from_model(model, class_names=names, preprocess=Preprocess(image_size=(64, 96)))
    photo = Image.effect_noise((96, 64), 80).convert("RGB")
    return vit.explain(bundle, [photo], **options).images[0]


def test_one_number_is_explained_and_told() -> None:
    image = explain_photo(1, ("age",))
    removal = image.maps[0]
    assert removal.caption == "patches that raise age (red) and lower it (blue)"
    assert removal.target == {"index": None, "name": "age", "probability": None}
    assert image.prediction["name"].startswith("age = ")
    assert removal.sanity_check is not None


def test_features_are_explained_by_a_function() -> None:
    image = explain_photo(0, (), target=cosine, methods=("gae",))
    assert image.prediction["name"].startswith("cosine = ")
    assert image.maps[0].key.endswith("gae.cosine")
    with pytest.raises(ValueError, match=r"no classifier.* function of its features"):
        explain_photo(0, (), methods=("gae",))


SYNONYMS = ("great white shark, white shark", "crane, bird", "crane", "Cat", "drake, crane machine")


@pytest.mark.parametrize(
    ("names", "target", "expected"),
    [
        (NAMES, "cat - dog", -1),
        (NAMES, "0 - DOG", -1),
        (NAMES, "owl - 3", -4),
        (NAMES, "a - b", 8),  # a class of that name comes first
        (SYNONYMS, "great white shark", 1),
        (SYNONYMS, "White Shark", 1),
        (SYNONYMS, "cat", 8),
        (SYNONYMS, "crane", 4),
        (SYNONYMS, "2", 4),
        (SYNONYMS, 2, 4),
        (tuple("32104"), "3", 1),
        (tuple("32104"), 3, 8),
    ],
)
def test_classes_by_name_index_and_synonym(
    names: tuple[str, ...], target: str, expected: int
) -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0]])
    built = build_target(target, names)
    assert built.score(logits, built.choose(logits)[:, 0]).item() == expected


@pytest.mark.parametrize(
    ("names", "kind", "target", "message"),
    [
        (NAMES, "classes", "cat - cow", "unknown class 'cow'; known: 0 to 4 or cat"),
        (NAMES, "numbers", "auto", "unknown class 'auto'; known: 0 to 4 or cat"),
        (NAMES, "classes", "5", "unknown class '5'"),
        (SYNONYMS, "classes", "CRANE", r"'CRANE' is not unique: 1 .* 2 .*; give the index"),
        (SYNONYMS, "classes", "shark", "unknown class 'shark'"),
        (NAMES, "classes", [1, 2], "there are 2 targets for 4 images"),
        (NAMES, "classes", ["auto"] * 4, "unknown class 'auto'"),
    ],
)
def test_targets_that_mean_nothing_are_refused(
    names: tuple[str, ...], kind: Any, target: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_target(target, names, kind, num_images=4)


def test_a_function_that_gives_no_number_an_image_is_refused() -> None:
    target = build_target(lambda logits: logits.sum(), NAMES)
    with pytest.raises(ValueError, match=r"the target gives .* of 2 images"):
        target.score(torch.zeros(2, 5), target.choose(torch.zeros(2, 5))[:, 0])


def test_each_image_has_its_target_however_the_batch_is_divided(tmp_path: Path) -> None:
    """By thread, by batch, as a tensor of images, and in training mode."""
    torch.manual_seed(0)
    model = vit.VisionTransformer(
        16, 4, num_classes=5, embed_dim=16, depth=2, num_heads=2, global_pool="avg"
    )
    bundle = Bundle.from_model(model, class_names=NAMES, preprocess=Preprocess((16, 16)))
    photos = torch.randint(0, 256, (16, 16, 16, 3), dtype=torch.uint8).numpy()
    paths = [tmp_path / f"{number}.png" for number in range(16)]
    for path, photo in zip(paths, photos, strict=True):
        Image.fromarray(photo).save(path)
    labels = torch.arange(16) % 5
    images = bundle.preprocess.normalize(torch.from_numpy(photos))

    def explain(chosen: slice, **options: Any) -> Tensor:
        arguments = {"methods": "gae", "checks": False, **options}
        return vit.explain(bundle, paths[chosen], **arguments).maps["gae"]

    alone = [explain(slice(row, row + 1), target=int(labels[row])) for row in range(16)]
    expected = torch.cat(alone)
    named = [NAMES[label] for label in labels]
    for found in (
        explain(slice(None), target=labels),
        explain(slice(None), target=named, batch_size=3),
        vit.attribute(model.train(), images, method="gae", target=labels),
        vit.attribute(bundle, images, method="gae", target=named),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
        assert not found.requires_grad

    assert model.training


def list_targets(result: Any) -> list[list[int | None]]:
    """The classes that the maps of each image explain."""
    return [[one.target["index"] for one in image.maps] for image in result.images]


class Patches(nn.Module):
    """A linear model of several labels: the logit of a label is 16 times the mean of its colour
    less 2, so that a patch of its colour alone is evidence for it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 4, stride=4)
        self.conv.weight.data = 16 * torch.eye(3)[:, :, None, None].expand(3, 3, 4, 4) / 16
        self.conv.bias.data.fill_(-2.0)  # type: ignore[union-attr]

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(images).mean(dim=(2, 3))


def make_labels(**metadata: Any) -> tuple[Bundle, np.ndarray]:
    """A model of the labels red, green and blue, and photos: red and a darker green in opposite
    quarters, and a weak blue in one patch."""
    preprocess = Preprocess((16, 16), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    bundle = Bundle.from_model(
        Patches(), class_names=("red", "green", "blue"), preprocess=preprocess
    )
    bundle = replace(bundle, data={"task": "multilabel"}, metadata={**bundle.metadata, **metadata})
    photos = np.zeros((2, 16, 16, 3), dtype=np.uint8)
    photos[0, :8, :8, 0] = 255
    photos[0, 8:, 8:, 1] = 204
    photos[1, 4:8, 8:12, 2] = 153
    return bundle, photos


def test_each_label_that_is_present_has_its_map_and_its_test() -> None:
    bundle, photos = make_labels()
    options: dict[str, Any] = {"methods": "grad-cam", "checks": True}
    result = vit.explain(bundle, list(photos), **options)
    # the logits are 16/4 - 2 = 2, 16/5 - 2 = 1.2 and -2; 16 · 0.6/16 - 2 = -1.4 is no label
    assert list_targets(result) == [[0, 1], [2]]
    labels = [[label["index"] for label in image.prediction["labels"]] for image in result.images]
    assert labels == [[0, 1], []]
    expected = torch.tensor([[2, 1.2, -2], [-2, -2, -1.4]]).sigmoid()
    probabilities = np.stack([image.probabilities for image in result.images])
    torch.testing.assert_close(torch.from_numpy(probabilities), expected, atol=1e-6, rtol=0)
    maps = result.maps["grad-cam"]
    assert maps[1, 1].isnan().all()
    # the mean of each label's feature map is its logit
    colours = torch.from_numpy(photos[0, ::4, ::4, :2] / 255).float().movedim(-1, 0)
    torch.testing.assert_close(maps[0], (16 * colours - 2).clamp_min(0) / 16)
    captions = [one.caption for one in result.images[0].maps]
    assert captions[1] == "evidence for green"
    predicted = [image.describe_prediction() for image in result.images]
    assert predicted[0] == "predicted red  88.1 %, green  76.9 %"
    assert predicted[1] == "no label predicted; most probable: blue  19.8 %"


def test_thresholds_decide_which_labels_are_explained() -> None:
    thresholds = {"red": 0.9, "green": 0.5, "blue": 0.19}
    bundle, photos = make_labels(operating_point={"rule": "f1", "thresholds": thresholds})
    options: dict[str, Any] = {"methods": "grad-cam", "checks": False}
    result = vit.explain(bundle, list(photos), **options)
    assert list_targets(result) == [[1], [2]]
    named = vit.explain(bundle, list(photos), target=["red", "green"], **options)
    assert list_targets(named) == [[0], [1]]
    # alone and in a batch, and as tensors
    images = bundle.preprocess.normalize(torch.from_numpy(photos))
    alone = vit.attribute(bundle, images[:1], method="grad-cam", target="green")
    assert torch.equal(alone[0], result.maps["grad-cam"][0])
    # a difference isn't about one class
    difference = vit.explain(bundle, list(photos), target="red - green", **options)
    assert list_targets(difference) == [[None], [None]]

    # one class against the rest, below and above its threshold (0.0155)
    for threshold, expected in ((0.02, 0), (0.01, 2)):
        point = {"rule": "f1", "thresholds": {"blue": threshold}}
        classes = replace(bundle, data={}, metadata={"operating_point": point})
        result = vit.explain(classes, list(photos[:1]), **options)
        assert list_targets(result) == [[expected]]
        assert result.images[0].prediction["index"] == expected
