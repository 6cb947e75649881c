"""Targets beyond one softmax class: against finite differences in float64, and against a model whose
classifier was changed so that its one output is the target."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import vit
from tests.explanation.methods.test_removal import Gates
from tests.explanation.model_zoo import build_timm, prepare
from vit.analysis.faithfulness.benchmark import Benchmark
from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.explanation.checks.sanity_checks import check_maps
from vit.explanation.methods.maps import compute_maps
from vit.explanation.methods.registry import list_methods
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
    "sigmoid": (
        5,
        "classes",
        "sigmoid:dog",
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
    "cosine": (0, "features", vit.CosineTarget(EMBEDDING), cosine, cosine),
}


def make(num_classes: int) -> tuple[nn.Module, Tensor]:
    model, images = prepare(build_timm(num_classes=num_classes), (64, 96))
    return model.double(), images.double()


def explain(
    model: nn.Module, images: Tensor, case: str, methods: list[str]
) -> tuple[Any, Tensor, Any]:
    count, kind, target, _, _ = CASES[case]
    record = build_target(target, NAMES[:count], kind)  # type: ignore[arg-type]
    return compute_maps(model, images, methods=methods, target=record, keep="gradients")


@pytest.mark.parametrize("case", CASES)
def test_maps_are_derivatives_of_the_target(case: str) -> None:
    model, images = make(CASES[case][0])
    score, value = CASES[case][3:]
    _, _, maps = explain(model, images, case, ["input-x-gradient", "removal-gradient"])
    pixels, removal = (found.values[:, 0].double() for found in maps)
    for row, column in ((0, 0), (2, 3), (3, 5)):
        patch = torch.zeros_like(images)
        place = (..., slice(16 * row, 16 * row + 16), slice(16 * column, 16 * column + 16))
        patch[place] = images[place]
        gates = torch.zeros(len(images), 25, dtype=torch.float64)
        gates[:, 1 + 6 * row + column] = STEP
        with torch.no_grad():
            scores = [
                score(compute_logits(model, images + sign * STEP * patch)) for sign in (1, -1)
            ]
            values = []
            for sign in (1, -1):
                with Gates(1 + sign * gates):
                    values.append(value(compute_logits(model, images)))
        expected = (scores[0] - scores[1]) / (2 * STEP)
        assert (pixels[:, row, column] - expected).abs().max() < 1e-5 * pixels.abs().max()
        expected = (values[0] - values[1]) / (2 * STEP)
        assert (removal[:, row, column] - expected).abs().max() < 1e-5 * removal.abs().max()


def make_pair() -> tuple[nn.Module, nn.Module, Tensor]:
    """A classifier, and the same with one output: the logit of owl less that of cat."""
    model, images = make(5)
    single, _ = make(1)
    state = model.state_dict()
    for name in ("head.weight", "head.bias"):
        state[name] = (state[name][2] - state[name][0])[None]
    single.load_state_dict(state)
    return model, single, images


def test_every_method_and_check_explains_the_target() -> None:
    model, single, images = make_pair()
    methods = list_methods()
    forward, targets, maps = explain(model, images, "difference", methods)
    expected_forward, expected_targets, expected = explain(single, images, "number", methods)
    checks = check_maps(forward, targets, maps, predicted_first=True)
    expected_checks = check_maps(expected_forward, expected_targets, expected, predicted_first=True)
    for i, method in enumerate(methods):
        torch.testing.assert_close(
            maps[i].values, expected[i].values, rtol=1e-4, atol=1e-7, msg=method
        )
        for one, other in zip(checks[i], expected_checks[i], strict=True):
            torch.testing.assert_close(one.agreement, other.agreement, rtol=1e-4, atol=1e-6)
            assert one.patches == other.patches


def test_faithfulness_measures_the_target() -> None:
    model, single, images = make_pair()
    random_maps = torch.rand(1, len(images), 4, 6)
    results = []
    for net, case in ((model, "difference"), (single, "number")):
        count, kind, target, _, _ = CASES[case]
        bundle = Bundle.from_model(
            net, class_names=NAMES[:count], preprocess=Preprocess(image_size=(64, 96))
        )
        record = build_target(target, NAMES[:count], kind)  # type: ignore[arg-type]
        classes = record.choose(torch.zeros(len(images), count))[:, 0]
        benchmark = Benchmark(bundle, images, classes, ("rollout", "gae"), record)
        benchmark.grid, benchmark.precision = (4, 6), "float32"
        maps = benchmark._explain(net, images, classes, ["rollout", "gae"])
        with torch.no_grad():
            areas = torch.stack(benchmark._compute_areas(random_maps, fill="mean"))
            drops = benchmark._leave_one_out(net, images, classes)
        results.append([maps["gae"], areas, drops])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def explain_photos(model: nn.Module, names: tuple[str, ...], output: Path, **options: Any) -> Any:
    bundle = Bundle.from_model(model, class_names=names, preprocess=Preprocess(image_size=(64, 96)))
    photo = Image.effect_noise((96, 64), 80).convert("RGB")
    formats = ("png", "npz", "html")
    vit.explain(bundle, [photo], output=output, formats=formats, **options)
    manifest = json.loads((output / "manifest.json").read_text())
    return manifest["images"][0]


def test_one_number_is_explained_and_told(tmp_path: Path) -> None:
    model, _ = prepare(build_timm(num_classes=1), (64, 96))
    image = explain_photos(model, ("age",), tmp_path / "maps")
    assert image["predicted"]["name"].startswith("age = ")
    assert image["predicted"]["probability"] is None
    removal = image["maps"][0]
    assert removal["caption"] == "patches that raise age (red) and lower it (blue)"
    assert removal["target"] == {"index": None, "name": "age", "probability": None}
    assert image["predicted"]["name"] == f"age = {removal['score']:.4g}"
    assert removal["sanity_check"] is not None


def test_several_labels_have_sigmoids(tmp_path: Path) -> None:
    model, _ = prepare(build_timm(), (64, 96))
    model.config = SimpleNamespace(problem_type="multi_label_classification")
    image = explain_photos(model, NAMES, tmp_path / "maps", target="top3", methods=("gae",))
    for found in image["maps"]:
        expected = torch.tensor(found["score"]).sigmoid().item()
        assert abs(found["target"]["probability"] - expected) < 1e-6
    assert sum(found["target"]["probability"] for found in image["maps"]) > 1.1


def test_features_are_explained_by_a_cosine(tmp_path: Path) -> None:
    model, _ = prepare(build_timm(num_classes=0), (64, 96))
    target = vit.CosineTarget(EMBEDDING)
    image = explain_photos(model, (), tmp_path / "maps", target=target, methods=("gae",))
    assert image["predicted"]["name"].startswith("cosine similarity = ")
    assert image["maps"][0]["map_key"].endswith("gae.cosine similarity")
    assert -1 <= image["maps"][0]["score"] <= 1
    with pytest.raises(ValueError, match=r"no classifier.* vit\.CosineTarget"):
        explain_photos(model, (), tmp_path / "other", methods=("gae",))
    wrong = vit.CosineTarget(torch.ones(5))
    with pytest.raises(ValueError, match="5 numbers has no cosine with 24 features"):
        explain_photos(model, (), tmp_path / "other", target=wrong, methods=("gae",))


def test_differences_of_names_that_contain_the_separator() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0]])
    for text, expected in {
        "cat - dog": -1,
        "0 - DOG": -1,
        "a - b - cat": 7,
        "owl - a - b": -4,
        "b - a - b": 8,
    }.items():
        target = build_target(text, NAMES)
        assert target.score(logits, target.choose(logits)[:, 0]).item() == expected
    # a class of that name comes first
    target = build_target("a - b", NAMES)
    assert target.score(logits, target.choose(logits)[:, 0]).item() == 8
    with pytest.raises(ValueError, match="several differences; give the indices"):
        build_target("a - b - b", (*NAMES, "a", "b - b"))
    with pytest.raises(ValueError, match="unknown class 'cat - cow'"):
        build_target("cat - cow", NAMES)
    with pytest.raises(ValueError, match="several numbers; which"):
        build_target("auto", NAMES, "numbers")


def test_a_function_that_gives_no_number_an_image_is_refused() -> None:
    target = build_target(lambda logits: logits.sum(), NAMES)
    with pytest.raises(ValueError, match=r"the target gives \[\] of 2 images"):
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
        arguments = {"methods": "gae", "sanity_checks": False, **options}
        return vit.explain(bundle, paths[chosen], **arguments).maps["gae"]

    alone = [explain(slice(row, row + 1), target=int(labels[row])) for row in range(16)]
    expected = torch.cat(alone)
    named = [NAMES[label] for label in labels]
    for found in (
        explain(slice(None), target=labels),
        explain(slice(None), target=named, batch_size=3),
        vit.attribute(model.train(), images, method="gae", target=labels),
        vit.attribute(bundle, images, method="gae", target=named, batch_size=5),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
        assert not found.requires_grad

    # a difference for each image is the difference of two labels' maps where these are linear
    others = (labels + 2) % 5
    pairs = [f"{int(one)} - {int(other)}" for one, other in zip(labels, others, strict=True)]
    options = {"method": "input-x-gradient", "batch_size": 7}
    difference = vit.attribute(model, images, target=pairs, **options)
    minuend = vit.attribute(model, images, target=labels, **options)
    subtrahend = vit.attribute(model, images, target=others, **options)
    torch.testing.assert_close(difference, minuend - subtrahend, rtol=1e-4, atol=1e-6)
    result = vit.explain(bundle, photos[:2], methods="gae", target=["owl - cat", "cat - b"])
    assert [image.maps[0].target_name for image in result.images] == ["owl - cat", "cat - b"]
    assert vit.attribute(model, images, method="gae", target="top3").shape == (16, 3, 4, 4)
    assert model.training


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (lambda logits: logits[range(len(logits)), [0, 1, 2, 3][: len(logits)]], "depends on the"),
        (lambda logits: logits[torch.arange(4), torch.arange(4)], "fails for 1 images"),
        ([1, 2], "there are 2 targets for 4 images"),
        (["auto"] * 4, "a name or an index, not 'auto'"),
        (["0 - 1", "0", "1", "2"], "of one kind"),
    ],
)
def test_targets_of_images_that_mean_nothing_are_refused(target: Any, message: str) -> None:
    model = vit.VisionTransformer(8, 4, num_classes=5, embed_dim=8, depth=1, num_heads=2)
    images = torch.randn(4, 3, 8, 8)
    with pytest.raises(ValueError, match=message):
        vit.attribute(model, images, method="gae", target=target, batch_size=1)
