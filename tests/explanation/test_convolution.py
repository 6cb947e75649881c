"""Maps of models without attention are those of the papers, in float64."""

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn

from vit.bundle import Bundle
from vit.data.images import Preprocess
from vit.explanation.convolution import explain_without_attention

SIZE = 64


def make_bundle(model: nn.Module, size: int = SIZE) -> Bundle:
    return Bundle.from_model(
        model.double(),
        class_names=tuple("abcde"),
        preprocess=Preprocess(image_size=(size, size)),
    )


def make_photo() -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    return Image.fromarray(values)


def normalise(bundle: Bundle, photo: Image.Image) -> Tensor:
    pixels = torch.from_numpy(bundle.preprocess.to_uint8(photo).copy())[None]
    return bundle.preprocess.normalize(pixels)


@pytest.fixture(autouse=True)
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels as precise as the models."""
    plain = Preprocess.normalize
    monkeypatch.setattr(Preprocess, "normalize", lambda self, pixels: plain(self, pixels).double())


def build_resnet() -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=5)


def build_swin() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=SIZE,
        window_size=2,
        embed_dim=12,
        depths=(1, 1, 1, 1),
        num_heads=(1, 1, 1, 1),
        num_classes=5,
    )


@pytest.mark.parametrize("build", [build_resnet, build_swin])
def test_grad_cam_of_a_pooled_map_is_the_classifiers_weights_on_it(build) -> None:
    """Behind a mean over the places and one linear layer, ∂f/∂A_k is the layer's weight over the
    number of places (Zhou et al. 2016's CAM)."""
    bundle = make_bundle(build())
    model = bundle.model
    photo = make_photo()
    kept = []
    is_resnet = hasattr(model, "layer4")
    last = model.layer4 if is_resnet else model.norm
    handle = last.register_forward_hook(lambda module, args, output: kept.append(output))
    with torch.no_grad():
        model(normalise(bundle, photo))
    handle.remove()
    features = kept[0][0] if is_resnet else kept[0][0].permute(2, 0, 1)  # [C, rows, columns]
    weights = model.fc.weight[3] if is_resnet else model.head.fc.weight[3]
    expected = (weights[:, None, None] * features).sum(dim=0).clamp_min(0) / features[0].numel()
    (found,) = explain_without_attention(bundle, photo, target="d")
    assert found.shape == (2, 2)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("build", [build_resnet, build_swin])
def test_input_x_gradient_is_the_derivative_along_each_part(build) -> None:
    bundle = make_bundle(build())
    photo = make_photo()
    (found,) = explain_without_attention(bundle, photo, "input-x-gradient", target="d")
    image = normalise(bundle, photo)
    half = SIZE // 2
    step = 1e-5
    for row, column in ((0, 0), (1, 0)):
        part = torch.zeros_like(image)
        place = (
            ...,
            slice(half * row, half * (row + 1)),
            slice(half * column, half * (column + 1)),
        )
        part[place] = image[place]
        with torch.no_grad():
            above, below = (bundle.model(image + sign * step * part)[0, 3] for sign in (1, -1))
        expected = (above - below) / (2 * step)
        assert abs(found[row, column] - expected) < 1e-4 * found.abs().max()


def test_others_are_refused_in_a_sentence() -> None:
    bundle = make_bundle(build_resnet())
    with pytest.raises(ValueError, match="method 'rollout'"):
        explain_without_attention(bundle, make_photo(), "rollout")
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 5))
    with pytest.raises(ValueError, match="Sequential has no feature map"):
        explain_without_attention(make_bundle(flat), make_photo())
