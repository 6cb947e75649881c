"""Known architectures by name: timm's, and small ones for small images.
`VisionTransformer(**PRESETS[name])`."""

import math

import torch
from torch import nn

from vit.model.vision_transformer import Architecture, VisionTransformer
from vit.runtime.arguments import as_pair

# embed_dim, depth, num_heads
_SIZES = {
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
# size, patch size and image sizes of Dosovitskiy et al. 2021, and of Steiner et al. 2021
_PLAIN = (
    ("tiny", 16, (224, 384)),
    ("small", 32, (224, 384)),
    ("small", 16, (224, 384)),
    ("base", 32, (224, 384)),
    ("base", 16, (224, 384)),
    ("base", 8, (224,)),
    ("large", 32, (384,)),
    ("large", 16, (224, 384)),
    ("large", 14, (224,)),
)


def _sized(size: str, patch_size: int, img_size: int) -> Architecture:
    embed_dim, depth, num_heads = _SIZES[size]
    return {
        "img_size": img_size,
        "patch_size": patch_size,
        "embed_dim": embed_dim,
        "depth": depth,
        "num_heads": num_heads,
    }


def _build_presets() -> dict[str, Architecture]:
    presets: dict[str, Architecture] = {}
    for size, patch_size, img_sizes in _PLAIN:
        for img_size in img_sizes:
            name = f"vit_{size}_patch{patch_size}_{img_size}"
            presets[name] = _sized(size, patch_size, img_size)

    # Touvron et al. 2021 (DeiT) and 2022 (DeiT III)
    for size, img_size in [("tiny", 224), ("small", 224), ("base", 224), ("base", 384)]:
        deit = _sized(size, 16, img_size)
        presets[f"deit_{size}_patch16_{img_size}"] = deit
        presets[f"deit_{size}_distilled_patch16_{img_size}"] = deit | {"distilled": True}
    for size in ("small", "medium", "base", "large"):
        for img_size in (224,) if size == "medium" else (224, 384):
            deit3 = _sized(size, 16, img_size) | {"no_embed_class": True, "init_values": 1e-6}
            presets[f"deit3_{size}_patch16_{img_size}"] = deit3

    # Oquab et al. 2023; Darcet et al. 2024 with registers. Feature extractors: no classes of their
    # own
    for size in ("small", "base", "large", "giant"):
        dino = _sized(size, 14, 518) | {"init_values": 1e-5, "num_classes": 0}
        if size == "giant":
            dino |= {"mlp": "swiglu", "mlp_ratio": 2 * 2.66667}
        registers = {"reg_tokens": 4, "no_embed_class": True}
        presets[f"vit_{size}_patch14_dinov2"] = dino
        presets[f"vit_{size}_patch14_reg4_dinov2"] = dino | registers

    # For 32-pixel images, 10 classes by default; mini has the shape of CCT's ViT-Lite-7/4
    for size in ("nano", "micro", "mini", "tiny", "small"):
        small = _sized(size, 4, 32) | {"num_classes": 10, "global_pool": "avg"}
        if size in ("nano", "micro", "mini"):
            small["mlp_ratio"] = 2.0
        presets[f"vit_{size}_patch4_32"] = small
    return presets


PRESETS = _build_presets()


def compute_flops(architecture: Architecture) -> int:
    """Floating-point operations of a forward pass of one image: twice the multiply-adds of its
    matrix products and convolutions.

    From the sizes of the weights alone, which takes no longer for large models: torch's counter
    runs a model, and imports torch's compiler, which takes 3 s.
    """
    with torch.device("meta"):
        model = VisionTransformer(**architecture)
    num_patches = math.prod(model.grid_size)
    num_tokens = num_patches + model.num_prefix_tokens

    # weights from queries and keys, and weighted values
    multiply_adds = 2 * len(model.blocks) * num_tokens**2 * model.embed_dim
    if model.seq_pool is not None:
        multiply_adds += num_patches * model.embed_dim  # the weighted mean

    # how many rows a linear map is applied to; the others to all tokens
    num_rows = {"head": 1, "head_dist": 1, "seq_pool": num_patches}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            multiply_adds += num_rows.get(name, num_tokens) * layer.weight.numel()
        elif isinstance(layer, nn.Conv2d) and name.startswith("patch_embed.proj"):
            multiply_adds += num_patches * layer.weight.numel()

    # each convolution of a stem runs once for every pixel that it gives
    num_pixels = math.prod(model.patch_embed.img_size)
    for layer in model.patch_embed.stem.children():
        if isinstance(layer, nn.Conv2d | nn.MaxPool2d):
            num_pixels //= math.prod(as_pair(layer.stride, name="stride"))
        if isinstance(layer, nn.Conv2d):
            multiply_adds += num_pixels * layer.weight.numel()
    return 2 * multiply_adds
