"""The model of this folder for timm, whose own VisionTransformer has neither convolutional stems
nor a squared ReLU.

import timm, timm_vit  # this file
model = timm.create_model("local-dir:FOLDER", pretrained=True)
"""

from functools import partial

import torch.nn.functional as F
from timm.layers import PatchEmbed, SwiGLUPacked
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
        return self.proj(self.stem(x)).flatten(2).transpose(1, 2)


def build(stem, mlp, distilled, **arguments):
    if mlp == "swiglu":
        arguments |= {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU}
    elif mlp == "relu2":
        arguments["act_layer"] = SquaredReLU
    arguments["embed_layer"] = PatchEmbed if stem == "patch" else partial(StemEmbed, stem=stem)
    model = VisionTransformerDistilled if distilled else VisionTransformer
    return model(**arguments)


def vit_with_stem(pretrained=False, **arguments):
    return build_model_with_cfg(build, "vit_with_stem", pretrained, **arguments)


if not is_model("vit_with_stem"):
    register_model(vit_with_stem)
