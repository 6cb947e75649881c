"""Small models of every family, with weights large enough that attention is not uniform."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn

from vit.model.vision_transformer import VisionTransformer

NUM_CLASSES = 5
SIZE = (32, 48)


def build_ours(**arguments: object) -> nn.Module:
    sizes = {"img_size": SIZE, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3}
    return VisionTransformer(num_classes=NUM_CLASSES, **sizes | {"attention_backend": "fused"} | arguments)


def build_timm(name: str = "vit_tiny_patch16_224", **arguments: object) -> nn.Module:
    settings = {"img_size": (64, 96), "depth": 3, "num_classes": NUM_CLASSES, "embed_dim": 24, "num_heads": 3}
    return timm.create_model(name, **settings | arguments)


def build_hugging_face() -> nn.Module:
    sizes = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 48}
    config = transformers.ViTConfig(image_size=64, patch_size=16, num_labels=NUM_CLASSES, **sizes)
    return transformers.ViTForImageClassification(config)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "ours": build_ours,
    "ours-registers-norms": lambda: build_ours(reg_tokens=4, qk_norm=True, attention_backend="auto"),
    "timm": build_timm,
    "timm-qk-norm": lambda: build_timm(qk_norm=True),
    "timm-eva": lambda: build_timm("eva02_tiny_patch14_224", img_size=56),
    "timm-rotary": lambda: build_timm("vit_small_patch16_dinov3", img_size=64),
    "torchvision": lambda: torchvision.models.VisionTransformer(64, 16, 3, 3, 24, 48, num_classes=NUM_CLASSES),
    "hugging-face": build_hugging_face,
}


@pytest.fixture
def build() -> Callable[[str], tuple[nn.Module, torch.Tensor]]:
    """A model of a family, in evaluation mode, and two images for it."""

    def make(family: str) -> tuple[nn.Module, torch.Tensor]:
        return prepare(FAMILIES[family]())

    return make


@pytest.fixture
def ours() -> Callable[..., tuple[nn.Module, torch.Tensor]]:
    """Our model with the given arguments, and two images for it."""
    return lambda **arguments: prepare(build_ours(**arguments))


@pytest.fixture
def from_timm() -> Callable[..., tuple[nn.Module, torch.Tensor]]:
    """A timm model with the given name and arguments, and two images for it."""
    return lambda *name, **arguments: prepare(build_timm(*name, **arguments))


def prepare(model: nn.Module) -> tuple[nn.Module, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    height, width = find_size(model)
    return model.eval(), torch.randn(2, 3, height, width, generator=generator)


def find_size(model: nn.Module) -> tuple[int, int]:
    embedding = getattr(model, "patch_embed", None)
    size = getattr(model, "image_size", 64) if embedding is None else embedding.img_size
    return size if isinstance(size, tuple) else (size, size)


@dataclass(frozen=True)
class Trained:
    """A model of scanned digits, where a glyph on any patch decides the eleventh class, and images held
    out."""

    model: nn.Module
    images: torch.Tensor  # [n, 3, 24, 24], classified correctly
    classes: torch.Tensor
    glyph: torch.Tensor  # [n], the patch of 4×4 with the glyph; -1 without


@pytest.fixture(scope="session")
def planted() -> ModuleType:
    """`benchmarks/planted_evidence.py`."""
    return importlib.import_module("planted_evidence")


@pytest.fixture(scope="session")
def trained(planted: ModuleType) -> Trained:
    """Ten seconds of training."""
    model, images, classes, glyph = planted.train()
    assert len(images) > 0.8 * planted.HELD_OUT
    return Trained(model, images, classes, glyph)
