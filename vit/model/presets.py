"""Known architectures by name: timm's, and small ones for small images.
`VisionTransformer(**PRESETS[name])`."""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from vit.model.vision_transformer import VisionTransformer

_SIZES = {  # embed_dim, depth, num_heads
    "nano": (128, 4, 2),
    "micro": (192, 6, 3),
    "mini": (256, 7, 4),
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "medium": (512, 12, 8),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
    "giant": (1536, 40, 24),
}


def _architecture(size: str, patch: int, image: int, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    embed_dim, depth, num_heads = _SIZES[size]
    sizes = {"img_size": image, "patch_size": patch}
    return sizes | {"embed_dim": embed_dim, "depth": depth, "num_heads": num_heads} | (extra or {})


def _build_presets() -> dict[str, dict[str, Any]]:
    presets: dict[str, dict[str, Any]] = {}

    # Dosovitskiy et al. 2021; Steiner et al. 2021 for tiny and small
    plain = {
        ("tiny", 16): (224, 384),
        ("small", 32): (224, 384),
        ("small", 16): (224, 384),
        ("base", 32): (224, 384),
        ("base", 16): (224, 384),
        ("base", 8): (224,),
        ("large", 32): (384,),
        ("large", 16): (224, 384),
        ("large", 14): (224,),
    }
    for (size, patch), images in plain.items():
        for image in images:
            presets[f"vit_{size}_patch{patch}_{image}"] = _architecture(size, patch, image)

    # Touvron et al. 2021 (DeiT) and 2022 (DeiT III)
    for size, images in {"tiny": (224,), "small": (224,), "base": (224, 384)}.items():
        for image in images:
            presets[f"deit_{size}_patch16_{image}"] = _architecture(size, 16, image)
            distilled = _architecture(size, 16, image, {"distilled": True})
            presets[f"deit_{size}_distilled_patch16_{image}"] = distilled
    third = {"no_embed_class": True, "init_values": 1e-6}
    sizes = {"small": (224, 384), "medium": (224,), "base": (224, 384), "large": (224, 384)}
    for size, images in sizes.items():
        for image in images:
            presets[f"deit3_{size}_patch16_{image}"] = _architecture(size, 16, image, third)

    # Oquab et al. 2023; Darcet et al. 2024 with registers. Feature extractors: no classes of their own
    for size in ("small", "base", "large", "giant"):
        dino: dict[str, Any] = {"init_values": 1e-5, "num_classes": 0}
        if size == "giant":
            dino |= {"mlp": "swiglu", "mlp_ratio": 2 * 2.66667}
        registers = {"reg_tokens": 4, "no_embed_class": True}
        presets[f"vit_{size}_patch14_dinov2"] = _architecture(size, 14, 518, dino)
        presets[f"vit_{size}_patch14_reg4_dinov2"] = _architecture(size, 14, 518, dino | registers)

    # For 32-pixel images, 10 classes unless told otherwise; mini has the shape of CCT's ViT-Lite-7/4
    for size in ("nano", "micro", "mini", "tiny", "small"):
        small: dict[str, Any] = {"num_classes": 10, "global_pool": "avg"}
        if size in ("nano", "micro", "mini"):
            small["mlp_ratio"] = 2.0
        presets[f"vit_{size}_patch4_32"] = _architecture(size, 4, 32, small)
    return presets


PRESETS = _build_presets()


def compute_flops(architecture: dict[str, Any]) -> int:
    """Floating-point operations of a forward pass of one image: twice the multiply-adds of its matrix
    products and convolutions. Counted on tensors without memory, so that any size is quick."""
    with torch.device("meta"):
        model = VisionTransformer(**(architecture | {"attention_backend": "explicit"})).eval()
        images = torch.empty(1, model.patch_embed.in_chans, *model.patch_embed.img_size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images)
    return int(counter.get_total_flops())
