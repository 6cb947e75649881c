"""Known architectures by name: timm's plain ones, and small ones for small images.

`VisionTransformer(**PRESETS[name])` builds one.
"""

import math

import torch
from torch import nn

from vit.model.vision_transformer import Architecture, VisionTransformer
from vit.runtime.arguments import as_pair

# (embed_dim, depth, num_heads) from Dosovitskiy et al. 2021 and Steiner et al. 2021.
_SIZES = {
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
}
# For images of 32 pixels; mini has the shape of CCT's ViT-Lite-7/4.
_SMALL_SIZES = {"nano": (128, 4, 2), "micro": (192, 6, 3), "mini": (256, 7, 4)}


def _build_presets() -> dict[str, Architecture]:
    presets: dict[str, Architecture] = {}
    for size, (embed_dim, depth, num_heads) in _SIZES.items():
        presets[f"vit_{size}_patch16_224"] = {
            "img_size": 224,
            "patch_size": 16,
            "embed_dim": embed_dim,
            "depth": depth,
            "num_heads": num_heads,
        }
    for size, (embed_dim, depth, num_heads) in _SMALL_SIZES.items():
        presets[f"vit_{size}_patch4_32"] = {
            "img_size": 32,
            "patch_size": 4,
            "embed_dim": embed_dim,
            "depth": depth,
            "num_heads": num_heads,
            "mlp_ratio": 2.0,
            "num_classes": 10,
            "global_pool": "avg",
        }
    return presets


PRESETS = _build_presets()


def compute_flops(architecture: Architecture) -> int:
    """Count the floating-point operations of a forward pass of one image.

    They are twice the multiply-adds of its matrix products and convolutions, computed from the
    sizes of the weights. torch's own counter would run the model and import torch's compiler, which
    takes 3 s.
    """
    with torch.device("meta"):
        model = VisionTransformer(**architecture)
    num_tokens = math.prod(model.grid_size) + model.num_prefix_tokens

    # Attention multiplies queries by keys, and weights by values.
    multiply_adds = 2 * len(model.blocks) * num_tokens**2 * model.embed_dim
    # The head maps one token, the other linear layers all of them.
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            num_rows = 1 if name.startswith("head") else num_tokens
            multiply_adds += num_rows * layer.weight.numel()

    # A convolution runs once for every pixel of its output.
    num_pixels = math.prod(model.patch_embed.img_size)
    for layer in model.patch_embed.modules():
        if isinstance(layer, nn.Conv2d | nn.MaxPool2d):
            num_pixels //= math.prod(as_pair(layer.stride, name="stride"))
        if isinstance(layer, nn.Conv2d):
            multiply_adds += num_pixels * layer.weight.numel()
    return 2 * multiply_adds
