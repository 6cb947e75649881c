"""The model of this folder for timm, whose own VisionTransformer has neither convolutional stems nor a squared ReLU.

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


class SquaredReLU(nn.Module):
    def forward(self, x):
        return F.relu(x).square()


class ResidualConv(nn.Module):
    def __init__(self, embed_dim):
        super().__init__()
        self.conv = nn.Conv2d(embed_dim, embed_dim, 3, padding=1, bias=False)

    def forward(self, x):
        return x + F.relu(self.conv(x))


class StemEmbed(nn.Module):
    """3x3 convolutions that halve the image by their stride ("conv") or by max pooling, down to the patch grid."""

    def __init__(self, img_size, patch_size, in_chans, embed_dim, stem, **unused):
        super().__init__()
        self.img_size, self.patch_size = tuple(img_size), tuple(patch_size)
        self.grid_size = tuple(side // patch for side, patch in zip(img_size, patch_size, strict=True))
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        halvings, pooled, layers = [side.bit_length() - 1 for side in patch_size], stem != "conv", []
        last = max(halvings) - 1
        for stage in range(last + 1):
            stride = tuple(1 + (stage < count) for count in halvings)
            narrower = 2 * (stage < last) if pooled else last - stage
            width = max(embed_dim >> narrower, 8) if narrower else embed_dim
            layers += [nn.Conv2d(in_chans, width, 3, 1 if pooled else stride, 1, bias=not pooled), nn.ReLU()]
            layers += [nn.MaxPool2d(3, stride, 1)] if pooled else []
            in_chans = width
        self.stem = nn.Sequential(*layers)
        self.proj = nn.Identity() if stem == "conv_pool" else ResidualConv(embed_dim)
        if stem == "conv":
            self.proj = nn.Conv2d(embed_dim, embed_dim, 1)

    def forward(self, x):
        return self.proj(self.stem(x)).flatten(2).transpose(1, 2)


def build(stem, mlp, distilled, **arguments):
    if mlp == "swiglu":
        arguments |= {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU}
    arguments["act_layer"] = SquaredReLU if mlp == "relu2" else arguments.get("act_layer")
    arguments["embed_layer"] = PatchEmbed if stem == "patch" else partial(StemEmbed, stem=stem)
    return (VisionTransformerDistilled if distilled else VisionTransformer)(**arguments)


def vit_with_stem(pretrained=False, **arguments):
    return build_model_with_cfg(build, "vit_with_stem", pretrained, **arguments)


if not is_model("vit_with_stem"):
    register_model(vit_with_stem)
