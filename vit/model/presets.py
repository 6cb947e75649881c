"""Known architectures by name: timm's plain ones, and small ones for small images.

`VisionTransformer(**PRESETS[name])` builds one.
"""

import math

import torch
from torch import nn

from vit.model.vision_transformer import Architecture, VisionTransformer
from vit.runtime.arguments import as_pair

# The sizes are from Dosovitskiy et al. 2021 and Steiner et al. 2021.
_LARGE_IMAGES: Architecture = {"img_size": 224, "patch_size": 16}
_SMALL_IMAGES: Architecture = {
    "img_size": 32,
    "patch_size": 4,
    "mlp_ratio": 2.0,
    "num_classes": 10,
    "global_pool": "avg",
}
PRESETS: dict[str, Architecture] = {
    "vit_tiny_patch16_224": _LARGE_IMAGES | {"embed_dim": 192, "depth": 12, "num_heads": 3},
    "vit_small_patch16_224": _LARGE_IMAGES | {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "vit_base_patch16_224": _LARGE_IMAGES | {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "vit_large_patch16_224": _LARGE_IMAGES | {"embed_dim": 1024, "depth": 24, "num_heads": 16},
    "vit_nano_patch4_32": _SMALL_IMAGES | {"embed_dim": 128, "depth": 4, "num_heads": 2},
    "vit_micro_patch4_32": _SMALL_IMAGES | {"embed_dim": 192, "depth": 6, "num_heads": 3},
    # It has the shape of CCT's ViT-Lite-7/4.
    "vit_mini_patch4_32": _SMALL_IMAGES | {"embed_dim": 256, "depth": 7, "num_heads": 4},
}


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
