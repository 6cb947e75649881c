"""Tiny models of every architecture whose attention can be read, with random weights large enough that attention is not
uniform. docs/generate.py makes the table of supported models from this list."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn

from vit.model.vision_transformer import VisionTransformer

NUM_CLASSES = 5
SIZE = (32, 48)
DEPTH, HEADS = 3, 3
_HUGGING_FACE = {"hidden_size": 24, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS, "image_size": 64}
_HUGGING_FACE |= {"intermediate_size": 48, "patch_size": 16, "num_labels": NUM_CLASSES}


@dataclass(frozen=True)
class TinyModel:
    """How to build it, the size of its images, and what the table of supported models says of it."""

    build: Callable[[], nn.Module]
    size: tuple[int, int]  # height, width
    library: str
    title: str


def build_ours(**arguments: object) -> nn.Module:
    sizes = {"img_size": SIZE, "patch_size": 8, "embed_dim": 24, "depth": DEPTH, "num_heads": HEADS}
    return VisionTransformer(num_classes=NUM_CLASSES, **sizes | {"attention_backend": "fused"} | arguments)


def build_timm(name: str = "vit_tiny_patch16_224", **arguments: object) -> nn.Module:
    settings = {"img_size": (64, 96), "depth": DEPTH, "num_classes": NUM_CLASSES, "embed_dim": 24, "num_heads": HEADS}
    return timm.create_model(name, **settings | arguments)


def build_torchvision() -> nn.Module:
    return torchvision.models.VisionTransformer(64, 16, DEPTH, HEADS, 24, 48, num_classes=NUM_CLASSES)


def build_hugging_face(name: str = "ViT", model: str = "ForImageClassification", **arguments: object) -> nn.Module:
    """Its configuration and model of this name, with tiny sizes and `arguments`."""
    configuration: Any = getattr(transformers, f"{name}Config")(**_HUGGING_FACE | arguments)
    built: nn.Module = getattr(transformers, f"{name}{model}")(configuration)
    return built


def build_hugging_face_tower(name: str) -> nn.Module:
    """An image classifier on the vision tower of a model of images and texts."""
    texts = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    configuration: Any = getattr(transformers, f"{name}Config")
    configuration = configuration(text_config=texts, vision_config=_HUGGING_FACE, num_labels=NUM_CLASSES)
    built: nn.Module = getattr(transformers, f"{name}ForImageClassification")(configuration)
    return built


class WithHead(nn.Module):
    """A backbone of Hugging Face, which has no classifier, with one."""

    def __init__(self, backbone: nn.Module, *, width: int = 24) -> None:
        super().__init__()
        self.backbone, self.classifier = backbone, nn.Linear(width, NUM_CLASSES)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.classifier(self.backbone(pixel_values).pooler_output)


def _ours(title: str, **arguments: object) -> TinyModel:
    return TinyModel(partial(build_ours, **arguments), SIZE, "this project", title)


def _timm(title: str, *name: str, **arguments: object) -> TinyModel:
    size = arguments.get("img_size", (64, 96))
    size = size if isinstance(size, tuple) else (size, size)
    return TinyModel(partial(build_timm, *name, **arguments), size, "timm", title)


def _hugging_face(title: str, build: Callable[[], nn.Module]) -> TinyModel:
    return TinyModel(build, (64, 64), "Hugging Face", title)


MODELS: dict[str, TinyModel] = {
    "ours": _ours("VisionTransformer"),
    "ours-avg": _ours('VisionTransformer, global_pool="avg"', global_pool="avg"),
    "ours-attention": _ours('VisionTransformer, global_pool="attention"', global_pool="attention"),
    "ours-max": _ours('VisionTransformer, global_pool="max"', global_pool="max"),
    "ours-distilled": _ours("VisionTransformer, distilled", distilled=True),
    "ours-registers-norms": _ours("VisionTransformer, registers", reg_tokens=4, qk_norm=True, attention_backend="auto"),
    "timm": _timm("VisionTransformer"),
    "timm-avg": _timm('VisionTransformer, global_pool="avg"', global_pool="avg", class_token=False),
    "timm-map": _timm('VisionTransformer, global_pool="map"', global_pool="map", class_token=False),
    "timm-registers": _timm("VisionTransformer, registers", global_pool="avg", reg_tokens=4),
    "timm-qk-norm": _timm("VisionTransformer, qk_norm", qk_norm=True),
    "timm-distilled": _timm("VisionTransformerDistilled", "deit_tiny_distilled_patch16_224"),
    "timm-eva": _timm("Eva (EVA-02)", "eva02_tiny_patch14_224", img_size=56),
    "timm-rotary": _timm("Eva (DINOv3)", "vit_small_patch16_dinov3", img_size=64),
    "torchvision": TinyModel(build_torchvision, (64, 64), "torchvision", "VisionTransformer"),
    "hugging-face": _hugging_face("ViTForImageClassification", build_hugging_face),
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    """A model of the list in evaluation mode, and two images for it."""
    return prepare(MODELS[name].build(), MODELS[name].size)


def prepare(model: nn.Module, size: tuple[int, int]) -> tuple[nn.Module, Tensor]:
    """`model` in evaluation mode with noise added to its weights, and two images of `size`."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval(), torch.randn(2, 3, *size, generator=generator)
