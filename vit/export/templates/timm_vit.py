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
    """3x3 convolutions that halve the image by their stride ("conv") or by max pooling, down to the
    patch grid."""

    def __init__(self, img_size, patch_size, in_chans, embed_dim, stem, **unused):
        super().__init__()
        self.img_size = tuple(img_size)
        self.patch_size = tuple(patch_size)
        self.grid_size = (img_size[0] // patch_size[0], img_size[1] // patch_size[1])
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        halvings = [side.bit_length() - 1 for side in patch_size]
        last = max(halvings) - 1
        layers = []
        for stage in range(last + 1):
            stride = tuple(1 + (stage < count) for count in halvings)
            width = embed_dim
            if stage < last:
                width = max(embed_dim >> (last - stage if stem == "conv" else 2), 8)
            if stem == "conv":
                layers += [nn.Conv2d(in_chans, width, 3, stride, 1), nn.ReLU()]
            else:
                layers += [nn.Conv2d(in_chans, width, 3, 1, 1, bias=False), nn.ReLU()]
                layers += [nn.MaxPool2d(3, stride, 1)]
            in_chans = width
        self.stem = nn.Sequential(*layers)
        self.proj = nn.Identity()
        if stem == "conv":
            self.proj = nn.Conv2d(embed_dim, embed_dim, 1)
        elif stem == "conv_pool_residual":
            self.proj = ResidualConv(embed_dim)

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
