"""Known architectures by name: timm's, and small ones for small images. `VisionTransformer(**PRESETS[name])`."""

import math
from typing import Any

import torch
from torch import nn

from vit.model.vision_transformer import VisionTransformer
from vit.runtime.arguments import as_pair

# embed_dim, depth, num_heads
_SIZES = {"nano": (128, 4, 2), "micro": (192, 6, 3), "mini": (256, 7, 4), "tiny": (192, 12, 3), "small": (384, 12, 6)}
_SIZES |= {"medium": (512, 12, 8), "base": (768, 12, 12), "large": (1024, 24, 16), "giant": (1536, 40, 24)}


def _architecture(size: str, patch_size: int, img_size: int, **more: Any) -> dict[str, Any]:
    encoder = dict(zip(("embed_dim", "depth", "num_heads"), _SIZES[size], strict=True))
    return {"img_size": img_size, "patch_size": patch_size} | encoder | more


def _build_presets() -> dict[str, dict[str, Any]]:
    presets: dict[str, dict[str, Any]] = {}
    # Dosovitskiy et al. 2021; Steiner et al. 2021 for tiny and small
    plain = [("tiny", 16), ("small", 32), ("small", 16), ("base", 32), ("base", 16), ("base", 8)]
    one_size = {("base", 8): (224,), ("large", 32): (384,), ("large", 14): (224,)}
    for size, patch in [*plain, ("large", 32), ("large", 16), ("large", 14)]:
        for image in one_size.get((size, patch), (224, 384)):
            presets[f"vit_{size}_patch{patch}_{image}"] = _architecture(size, patch, image)

    # Touvron et al. 2021 (DeiT) and 2022 (DeiT III)
    for size, image in [("tiny", 224), ("small", 224), ("base", 224), ("base", 384)]:
        presets[f"deit_{size}_patch16_{image}"] = _architecture(size, 16, image)
        presets[f"deit_{size}_distilled_patch16_{image}"] = _architecture(size, 16, image, distilled=True)
    for size in ("small", "medium", "base", "large"):
        for image in (224,) if size == "medium" else (224, 384):
            third = _architecture(size, 16, image, no_embed_class=True, init_values=1e-6)
            presets[f"deit3_{size}_patch16_{image}"] = third

    # Oquab et al. 2023; Darcet et al. 2024 with registers. Feature extractors: no classes of their own
    for size in ("small", "base", "large", "giant"):
        mlp = {"mlp": "swiglu", "mlp_ratio": 2 * 2.66667} if size == "giant" else {}
        dino = _architecture(size, 14, 518, init_values=1e-5, num_classes=0, **mlp)
        presets[f"vit_{size}_patch14_dinov2"] = dino
        presets[f"vit_{size}_patch14_reg4_dinov2"] = dino | {"reg_tokens": 4, "no_embed_class": True}

    # For 32-pixel images, 10 classes by default; mini has the shape of CCT's ViT-Lite-7/4
    for size in ("nano", "micro", "mini", "tiny", "small"):
        ratio = {"mlp_ratio": 2.0} if size in ("nano", "micro", "mini") else {}
        presets[f"vit_{size}_patch4_32"] = _architecture(size, 4, 32, num_classes=10, global_pool="avg", **ratio)
    return presets


PRESETS = _build_presets()


def compute_flops(architecture: dict[str, Any]) -> int:
    """Floating-point operations of a forward pass of one image: twice the multiply-adds of its matrix products and
    convolutions. From the sizes of the weights alone, which takes no longer for large models: torch's counter runs a
    model, and imports torch's compiler, which takes 3 s."""
    with torch.device("meta"):
        model = VisionTransformer(**architecture)
    patches, embed_dim = math.prod(model.grid_size), model.embed_dim
    tokens = patches + model.num_prefix_tokens
    rows_of = {"head": 1, "head_dist": 1, "seq_pool": patches}  # each linear map is applied to, others to all tokens
    multiply_adds = 2 * len(model.blocks) * tokens**2 * embed_dim  # weights from queries and keys, and weighted values
    multiply_adds += patches * embed_dim if model.seq_pool is not None else 0  # the weighted mean
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            multiply_adds += rows_of.get(name, tokens) * layer.weight.numel()
        elif isinstance(layer, nn.Conv2d) and name.startswith("patch_embed.proj"):
            multiply_adds += patches * layer.weight.numel()
    pixels = math.prod(model.patch_embed.img_size)
    for layer in model.patch_embed.stem.children():
        if isinstance(layer, nn.Conv2d | nn.MaxPool2d):
            pixels //= math.prod(as_pair(layer.stride, name="stride"))
        if isinstance(layer, nn.Conv2d):
            multiply_adds += pixels * layer.weight.numel()
    return 2 * multiply_adds
