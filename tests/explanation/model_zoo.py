"""Tiny models of every architecture whose attention can be read, with random weights large enough
that attention is not uniform. docs/generate.py makes the table of supported models from this
list."""

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
_HUGGING_FACE = {
    "hidden_size": 24,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "image_size": 64,
}
_HUGGING_FACE |= {"intermediate_size": 48, "patch_size": 16, "num_labels": NUM_CLASSES}
_SHARED_BIAS = {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True}
_DINOV3 = {"hidden_size": 24, "num_register_tokens": 4}
_MEAN, _ALL_MEAN, _BOTH = (
    "mean of the patches",
    "mean of all tokens",
    "class token and mean of the patches",
)
_CLASSES, _ATTENTION, _MAXIMUM = "class and distillation token", "attention pooling", "maximum"
READS = ("class token", _CLASSES, _MEAN, _ALL_MEAN, _BOTH, _ATTENTION, _MAXIMUM)


@dataclass(frozen=True)
class TinyModel:
    """How to build it, the size of its images, and what the table of supported models says of
    it."""

    build: Callable[[], nn.Module]
    size: tuple[int, int]  # height, width
    library: str
    title: str
    reads: str = "class token"  # what its classifier reads: one of `READS`


def build_ours(**arguments: object) -> nn.Module:
    sizes = {"img_size": SIZE, "patch_size": 8, "embed_dim": 24, "depth": DEPTH, "num_heads": HEADS}
    return VisionTransformer(
        num_classes=NUM_CLASSES, **sizes | {"attention_backend": "fused"} | arguments
    )


def build_timm(name: str = "vit_tiny_patch16_224", **arguments: object) -> nn.Module:
    settings = {
        "img_size": (64, 96),
        "depth": DEPTH,
        "num_classes": NUM_CLASSES,
        "embed_dim": 24,
        "num_heads": HEADS,
    }
    return timm.create_model(name, **settings | arguments)


def build_torchvision() -> nn.Module:
    return torchvision.models.VisionTransformer(
        64, 16, DEPTH, HEADS, 24, 48, num_classes=NUM_CLASSES
    )


def build_hugging_face(
    name: str = "ViT", model: str = "ForImageClassification", **arguments: object
) -> nn.Module:
    """Its configuration and model of this name, with tiny sizes and `arguments`."""
    configuration: Any = getattr(transformers, f"{name}Config")(**_HUGGING_FACE | arguments)
    built: nn.Module = getattr(transformers, f"{name}{model}")(configuration)
    return built


def build_hugging_face_tower(name: str) -> nn.Module:
    """An image classifier on the vision tower of a model of images and texts."""
    texts = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    configuration: Any = getattr(transformers, f"{name}Config")
    configuration = configuration(
        text_config=texts, vision_config=_HUGGING_FACE, num_labels=NUM_CLASSES
    )
    built: nn.Module = getattr(transformers, f"{name}ForImageClassification")(configuration)
    return built


class WithHead(nn.Module):
    """A backbone of Hugging Face, which has no classifier, with one."""

    def __init__(self, backbone: nn.Module, *, width: int = 24) -> None:
        super().__init__()
        self.backbone, self.classifier = backbone, nn.Linear(width, NUM_CLASSES)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.classifier(self.backbone(pixel_values).pooler_output)


def _ours(title: str, reads: str = "class token", **arguments: object) -> TinyModel:
    return TinyModel(partial(build_ours, **arguments), SIZE, "this project", title, reads)


def _timm(title: str, reads: str, *name: str, **arguments: object) -> TinyModel:
    size = arguments.get("img_size", (64, 96))
    size = size if isinstance(size, tuple) else (size, size)
    return TinyModel(partial(build_timm, *name, **arguments), size, "timm", title, reads)


def _hugging_face(
    title: str, build: Callable[[], nn.Module], reads: str = "class token"
) -> TinyModel:
    return TinyModel(build, (64, 64), "Hugging Face", title, reads)


MODELS: dict[str, TinyModel] = {
    "ours": _ours("VisionTransformer"),
    "ours-avg": _ours('VisionTransformer (global_pool="avg")', _MEAN, global_pool="avg"),
    "ours-registers-norms": _ours(
        "VisionTransformer (registers)", reg_tokens=4, qk_norm=True, attention_backend="auto"
    ),
    "timm": _timm("VisionTransformer", "class token"),
    "timm-avg": _timm(
        'VisionTransformer (global_pool="avg")', _MEAN, global_pool="avg", class_token=False
    ),
    "timm-max": _timm('VisionTransformer (global_pool="max")', _MAXIMUM, global_pool="max"),
    "timm-map": _timm(
        'VisionTransformer (global_pool="map")', _ATTENTION, global_pool="map", class_token=False
    ),
    "timm-registers": _timm(
        "VisionTransformer (registers)", _MEAN, global_pool="avg", reg_tokens=4
    ),
    "timm-qk-norm": _timm("VisionTransformer (qk_norm)", "class token", qk_norm=True),
    "timm-distilled": _timm(
        "VisionTransformerDistilled", _CLASSES, "deit_tiny_distilled_patch16_224"
    ),
    "timm-eva": _timm("Eva (EVA-02)", _MEAN, "eva02_tiny_patch14_224", img_size=56),
    "timm-rotary": _timm("Eva (DINOv3)", _MEAN, "vit_small_patch16_dinov3", img_size=64),
    "timm-rotary-mixed": _timm(
        "Eva (RoPE-ViT)", "class token", "vit_small_patch16_rope_mixed_224", img_size=64
    ),
    "timm-rotary-positions": _timm(
        "Eva (RoPE-ViT, position embedding)",
        "class token",
        "vit_small_patch16_rope_ape_224",
        img_size=64,
    ),
    "timm-perception-encoder": _timm(
        "Eva (Perception Encoder)", _ATTENTION, "vit_pe_core_tiny_patch16_384", img_size=64
    ),
    "timm-beit": _timm("Beit", _MEAN, "beit_base_patch16_224", img_size=64),
    "timm-beit-shared": _timm(
        "Beit (shared position bias)", _MEAN, "beit_base_patch16_224", img_size=64, **_SHARED_BIAS
    ),
    "torchvision": TinyModel(build_torchvision, (64, 64), "torchvision", "VisionTransformer"),
    "hugging-face": _hugging_face("ViTForImageClassification", build_hugging_face),
    "hugging-face-deit": _hugging_face(
        "DeiTForImageClassification", partial(build_hugging_face, "DeiT")
    ),
    "hugging-face-deit-distilled": _hugging_face(
        "DeiTForImageClassificationWithTeacher",
        partial(build_hugging_face, "DeiT", "ForImageClassificationWithTeacher"),
        _CLASSES,
    ),
    "hugging-face-msn": _hugging_face(
        "ViTMSNForImageClassification", partial(build_hugging_face, "ViTMSN")
    ),
    "hugging-face-ijepa": _hugging_face(
        "IJepaForImageClassification", partial(build_hugging_face, "IJepa"), _ALL_MEAN
    ),
    "hugging-face-dinov2": _hugging_face(
        "Dinov2ForImageClassification", partial(build_hugging_face, "Dinov2"), _BOTH
    ),
    "hugging-face-dinov2-registers": _hugging_face(
        "Dinov2WithRegistersForImageClassification",
        partial(build_hugging_face, "Dinov2WithRegisters"),
        _BOTH,
    ),
    "hugging-face-dinov3": _hugging_face(
        "DINOv3ViTModel + linear",
        lambda: WithHead(build_hugging_face("DINOv3ViT", "Model", **_DINOV3)),
    ),
    "hugging-face-beit": _hugging_face(
        "BeitForImageClassification",
        partial(build_hugging_face, "Beit", use_relative_position_bias=True, use_mean_pooling=True),
        _MEAN,
    ),
    "hugging-face-beit-shared": _hugging_face(
        "BeitForImageClassification (shared position bias, class token)",
        partial(
            build_hugging_face,
            "Beit",
            use_shared_relative_position_bias=True,
            use_mean_pooling=False,
        ),
    ),
    "hugging-face-clip": _hugging_face(
        "CLIPForImageClassification", partial(build_hugging_face_tower, "CLIP"), _MEAN
    ),
    "hugging-face-clip-tower": _hugging_face(
        "CLIPVisionModel + linear",
        lambda: WithHead(build_hugging_face("CLIPVision", "Model")),
    ),
    "hugging-face-metaclip2": _hugging_face(
        "MetaClip2ForImageClassification", partial(build_hugging_face_tower, "MetaClip2"), _MEAN
    ),
    "hugging-face-siglip": _hugging_face(
        "SiglipForImageClassification", partial(build_hugging_face_tower, "Siglip"), _ALL_MEAN
    ),
    "hugging-face-siglip-tower": _hugging_face(
        "SiglipVisionModel + linear",
        lambda: WithHead(build_hugging_face("SiglipVision", "Model")),
        _ATTENTION,
    ),
    "wrapped": TinyModel(
        lambda: nn.Sequential(nn.Identity(), build_timm(global_pool="avg", class_token=False)),
        (64, 96),
        "any",
        "nn.Sequential of one of these",
        _MEAN,
    ),
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    """A model of the list in evaluation mode, and two images for it. Always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return prepare(MODELS[name].build(), MODELS[name].size)


def prepare(model: nn.Module, size: tuple[int, int]) -> tuple[nn.Module, Tensor]:
    """`model` in evaluation mode with noise added to its weights, and two images of `size`."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval(), torch.randn(2, 3, *size, generator=generator)
