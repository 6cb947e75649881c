"""The model of this folder for timm, whose own VisionTransformer has neither convolutional stems
nor a squared ReLU.

import timm, timm_vit  # this file
model = timm.create_model("local-dir:FOLDER", pretrained=True)

"python timm_vit.py validate.py ..." runs a script of timm's that can open this folder.
"""

import runpy
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed, SwiGLUPacked, resample_abs_pos_embed
from timm.models import build_model_with_cfg, is_model, register_model
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vit.model.stem import build_stem


class SquaredReLU(nn.Module):
    def forward(self, x):
        return F.relu(x).square()


class StemEmbed(PatchEmbed):
    def __init__(self, stem, patch_size, in_chans, embed_dim, **arguments):
        super().__init__(patch_size=patch_size, in_chans=in_chans, embed_dim=embed_dim, **arguments)
        self.stem, self.proj = build_stem(stem, in_chans, embed_dim, patch_size)

    def forward(self, x):
        features = self.proj(self.stem(x))
        # timm adds the positions of images of any size to a grid
        return features.flatten(2).transpose(1, 2) if self.flatten else features.permute(0, 2, 3, 1)


def may_use_cudnn(key):
    is_half = key.dtype in (torch.bfloat16, torch.float16)
    return key.is_cuda and (is_half or torch.is_autocast_enabled("cuda"))


def centre_keys(norm, inputs, key):
    """Subtract the mean key, which leaves all attention weights as they are. Without it, the backward
    pass of cuDNN's kernel is NaN on an H100 or H200 where all scores of a row are far below 0."""
    if not may_use_cudnn(key):
        return key
    mean = key.mean(dim=-2, keepdim=True, dtype=torch.promote_types(key.dtype, torch.float32))
    return (key - mean).to(key.dtype)


def build(stem, mlp, distilled, **arguments):
    if mlp == "swiglu":
        arguments |= {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU}
    elif mlp == "relu2":
        arguments["act_layer"] = SquaredReLU
    arguments["embed_layer"] = PatchEmbed if stem == "patch" else partial(StemEmbed, stem=stem)
    model = (VisionTransformerDistilled if distilled else VisionTransformer)(**arguments)
    for block in model.blocks:
        block.attn.k_norm.register_forward_hook(centre_keys)
    return model


def resample_positions(weights, model):
    """Fit the weights to a model of another img_size."""
    sizes = zip(model.pretrained_cfg["input_size"][1:], model.patch_embed.patch_size, strict=True)
    old_size = tuple(side // patch for side, patch in sizes)
    if old_size != model.patch_embed.grid_size:
        weights["pos_embed"] = resample_abs_pos_embed(
            weights["pos_embed"],
            model.patch_embed.grid_size,
            old_size=old_size,
            num_prefix_tokens=0 if model.no_embed_class else model.num_prefix_tokens,
        )
    return weights


def vit_with_stem(pretrained=False, out_indices=3, **arguments):
    return build_model_with_cfg(
        build,
        "vit_with_stem",
        pretrained,
        pretrained_filter_fn=resample_positions,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **arguments,
    )


if not is_model("vit_with_stem"):
    register_model(vit_with_stem)

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
