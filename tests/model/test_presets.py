"""Every preset has its size."""

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


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_pinned(name):
    with torch.device("meta"):
        parameters = sum(
            parameter.numel() for parameter in VisionTransformer(**PRESETS[name]).parameters()
        )
    assert parameters == PARAMETERS[name]
