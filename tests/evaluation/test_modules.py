"""Modules of every library are evaluated, as the README promises."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import vit

SIDE, CLASSES = 16, 3


class Linear(nn.Module):
    """A module with nothing but a forward method."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * SIDE * SIDE, CLASSES, bias=False)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer(pixels.flatten(1))
        return logits


def build_timm() -> nn.Module:
    timm = pytest.importorskip("timm")
    model: nn.Module = timm.create_model(
        "vit_tiny_patch16_224", img_size=SIDE, patch_size=8, num_classes=CLASSES
    )
    return model


def build_torchvision() -> nn.Module:
    models = pytest.importorskip("torchvision.models")
    model: nn.Module = models.VisionTransformer(
        image_size=SIDE,
        patch_size=8,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        mlp_dim=16,
        num_classes=CLASSES,
    )
    return model


def build_hugging_face() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        image_size=SIDE,
        patch_size=8,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=CLASSES,
    )
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model


@pytest.mark.parametrize("build", [build_timm, build_torchvision, build_hugging_face, Linear])
def test_a_module_of_any_library_is_evaluated(build: Callable[[], nn.Module]) -> None:
    random = np.random.default_rng(0)
    names = ("ant", "bee", "cow")
    model = build().eval()
    images = [
        (random.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8), k % CLASSES) for k in range(9)
    ]
    bundle = vit.Bundle.from_model(
        model, class_names=names, preprocess=vit.Preprocess((SIDE, SIDE))
    )
    evaluation = vit.evaluate(bundle, dataset=images, device="cpu").evaluation
    assert evaluation.num_images == 9
    assert evaluation.metrics["top1"] is not None
