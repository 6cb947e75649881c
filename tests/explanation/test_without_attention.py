"""Maps of models without attention are those of the papers, in float64, and come through the loop
that explains vision transformers; those that would be wrong are refused."""

from collections.abc import Callable

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn

import vit
from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.explanation.capture.forward import Forward, run_forward
from vit.explanation.methods.gradients import compute_grad_cam

SIZE = 64
Build = Callable[[], nn.Module]


def build_resnet() -> nn.Module:
    return torchvision.models.resnet18(num_classes=5)


def build_timm_resnet() -> nn.Module:
    return timm.create_model("test_resnet", num_classes=5)


def build_convnext() -> nn.Module:
    # with the usual layer scale of 1e-6, maps of random weights are what float64 rounds away
    return timm.create_model("convnext_atto", depths=(1, 1, 1, 1), num_classes=5, ls_init_value=1.0)


def build_swin() -> nn.Module:
    return timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=SIZE,
        window_size=2,
        embed_dim=12,
        depths=(1, 1, 1, 1),
        num_heads=(1, 1, 1, 1),
        num_classes=5,
    )


BUILDS = [
    build_resnet,
    build_timm_resnet,
    build_convnext,
    build_swin,
]


def make_bundle(build: Build, size: int = SIZE) -> Bundle:
    torch.manual_seed(0)
    return Bundle.from_model(
        build(),
        class_names=tuple("abcde"),
        preprocess=Preprocess(image_size=(size, size)),
    )


def make_photo() -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    return Image.fromarray(values)


def run_in_float64(build: Build) -> Forward:
    bundle = make_bundle(build)
    pixels = torch.from_numpy(bundle.preprocess.to_uint8(make_photo()).copy())[None]
    images = bundle.preprocess.normalize(pixels).double()
    return run_forward(bundle.model.double(), images, gradients=True)


def classes_of(forward: Forward) -> Tensor:
    return torch.full((len(forward.images),), 3)


@pytest.mark.parametrize("build", BUILDS)
def test_grad_cam_is_the_derivative_along_the_feature_map(build: Build) -> None:
    """Σ_k α_k A_k of a place is, by finite differences, what the logit gains where the mean of
    each channel over all places grows by the channel's value at that place."""
    forward = run_in_float64(build)
    (found,) = compute_grad_cam(forward, classes_of(forward))
    assert forward.grid == (2, 2)
    assert found.shape == (4,)
    tokens = forward.tokens[0].detach()  # [places, C]
    # the innermost module that gives the feature map
    candidates = list(reversed(list(forward.reader.model.modules())))

    def logit_with(change: Tensor) -> Tensor:
        """The logit where every place of the feature map is changed by `change` [C]."""
        kept = forward.feature_map
        assert kept is not None
        is_last = kept.shape[1:3] == forward.grid
        added = change if is_last else change[:, None, None]

        def add(module: nn.Module, args: object, output: object) -> object:
            is_same = isinstance(output, Tensor) and output.shape == kept.shape
            return output + added if is_same and torch.equal(output, kept) else None

        for module in candidates:
            handle = module.register_forward_hook(add)
            with torch.no_grad():
                logit = forward.reader.model(forward.images.detach())[0, 3]
            handle.remove()
            if not torch.equal(logit, forward.logits[0, 3].detach()):
                candidates[:] = [module]
                return logit
        raise AssertionError("no module gives the feature map")

    step = 1e-4
    for place in range(4):
        change = step * tokens[place]
        slope = (logit_with(change) - logit_with(-change)) / (2 * step)
        # ∂f/∂(all places by the same) is the sum over the places of the gradient, α its mean
        expected = (slope / 4).clamp_min(0)
        torch.testing.assert_close(found[place], expected, rtol=1e-6, atol=1e-9)


def test_their_maps_are_checked_against_painting_over() -> None:
    """The bright corner that the model looks at is the evidence, and the map agrees with it."""

    class Brightest(nn.Module):
        """Two classes: how bright the top left quarter is, and zero."""

        num_classes = 2

        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Conv2d(3, 4, 8, stride=8)
            nn.init.ones_(self.features.weight)
            mask = torch.zeros(8, 8)
            mask[:3, :3] = torch.linspace(1, 2, 9).reshape(3, 3)
            self.register_buffer("mask", mask)

        def forward(self, images: Tensor) -> Tensor:
            features = self.features(images).clamp_min(0) * self.mask
            score = features.sum(dim=(1, 2, 3)) / 3000
            return torch.stack([score, torch.zeros_like(score)], dim=1)

    bundle = Bundle.from_model(
        Brightest(), class_names=("bright", "dark"), preprocess=Preprocess(image_size=(SIZE, SIZE))
    )
    values = np.full((SIZE, SIZE, 3), 90, dtype=np.uint8)
    values[:24, :24] = 220
    result = vit.explain(bundle, values, target="bright", checks=True)
    (check,) = result.checks["grad-cam"][0]
    assert check.verdict == "confirmed"


def test_methods_of_attention_are_refused_with_those_that_work() -> None:
    bundle = make_bundle(build_timm_resnet)
    with pytest.raises(
        ValueError,
        match=r"rollout is no method for ResNet \(.*\), which has grad-cam$",
    ):
        vit.explain(bundle, make_photo(), methods=("grad-cam", "rollout"))
    with pytest.raises(ValueError, match=r"isn't added .*, which has grad-cam$"):
        vit.explain(make_bundle(build_swin), make_photo(), methods="libra-removal")
    with pytest.raises(ValueError, match=r"unknown method 'gradcam'; known: grad-cam$"):
        vit.explain(bundle, make_photo(), methods="gradcam")


class Wrapped(nn.Module):
    """Another forward pass around a model."""

    def __init__(self, model: nn.Module, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.compute = forward

    def forward(self, images: Tensor) -> Tensor:
        return self.compute(self.model, images)


WRONG = {
    "augmented at test time": lambda model, images: model(images) + model(images.flip(-1)),
    "mirrored within": lambda model, images: model(images.flip(-1)),
    "turned within": lambda model, images: model(images.mT),
}


@pytest.mark.parametrize("build", [build_timm_resnet, build_convnext, build_swin])
@pytest.mark.parametrize("name", WRONG)
def test_maps_that_would_be_wrong_are_refused(build: Build, name: str) -> None:
    bundle = make_bundle(lambda: Wrapped(build(), WRONG[name]))
    with pytest.raises(ValueError, match="doesn't read one feature map alone"):
        vit.explain(bundle, make_photo(), methods="grad-cam")


class Mixer(nn.Module):
    """A classifier that reads 16 tokens, each of which mixes all patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, stride=8)
        self.mix = nn.Linear(64, 64)
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2)
        return self.head(self.mix(tokens).mean(dim=2))


def build_flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 5))


@pytest.mark.parametrize("build", [Mixer, build_flat])
def test_models_without_a_feature_map_are_refused(build: Build) -> None:
    with pytest.raises(ValueError, match="doesn't read one feature map alone"):
        vit.explain(make_bundle(build), make_photo())


def test_a_model_is_searched_for_attention_once() -> None:
    model = build_timm_resnet()
    bundle = Bundle.from_model(model, preprocess=Preprocess(image_size=(SIZE, SIZE)))
    calls = []
    model.conv1.register_forward_pre_hook(lambda *_: calls.append(1))

    def explain() -> tuple[int, Tensor]:
        calls.clear()
        photo = np.zeros((SIZE, SIZE, 3), np.uint8)
        maps = vit.explain(bundle, photo, checks=False, device="cpu").maps["grad-cam"]
        return len(calls), maps

    (first, expected), (second, found) = explain(), explain()
    assert second == 1 < first
    assert torch.equal(found, expected)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    assert explain()[0] == first
