"""Every preset: its size pinned, every parameter alive."""

import pytest
import torch

from vit.model.presets import PRESETS
from vit.model.vision_transformer import VisionTransformer

PARAMETERS = {
    "vit_tiny_patch16_224": 5_717_416,
    "vit_small_patch16_224": 22_050_664,
    "vit_base_patch16_224": 86_567_656,
    "vit_large_patch16_224": 304_326_632,
    "vit_nano_patch4_32": 545_930,
    "vit_micro_patch4_32": 1_806_154,
    "vit_mini_patch4_32": 3_721_738,
}


def build(name, **changes):
    return VisionTransformer(**(PRESETS[name] | changes))


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_pinned(name):
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build(name).parameters())
    assert parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_every_parameter_receives_a_gradient(name):
    """On a grid of 2×3 patches and three blocks, which is all that differs from the preset
    itself."""
    torch.manual_seed(0)
    side = PRESETS[name]["patch_size"]
    wide = PRESETS[name]["embed_dim"] >= 768
    model = build(name, img_size=(2 * side, 3 * side), depth=1 if wide else 3)
    model(torch.randn(2, 3, 2 * side, 3 * side)).square().sum().backward()
    idle = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ]
    assert idle == []
