"""Known architectures by name: timm's plain ones, and small ones for small images.

`VisionTransformer(**PRESETS[name])` builds one.
"""

from vit.model.vision_transformer import Architecture

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
