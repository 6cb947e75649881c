"""Convolutional stems, which halve the image down to the patch grid.

`vit export` copies this file into folders for timm, so it imports torch alone.
"""

import torch.nn.functional as F
from torch import Tensor, nn


def build_stem(
    stem: str, in_chans: int, embed_dim: int, patch_size: tuple[int, int]
) -> tuple[nn.Sequential, nn.Module]:
    """Build a stem, and the layer that follows it on the patch grid.

    The stem has 3×3 convolutions with ReLU, whose stride or max pooling halves the image. See
    `PatchEmbed`; patch sides are powers of two.
    """
    # A side that has reached the grid keeps its length in the remaining stages.
    row_halvings, column_halvings = (side.bit_length() - 1 for side in patch_size)
    num_stages = max(row_halvings, column_halvings)
    strides = [
        (1 + (stage < row_halvings), 1 + (stage < column_halvings)) for stage in range(num_stages)
    ]
    if stem == "conv_residual":
        strides = [(1, 1), *strides]  # its first stage is on the pixels
    layers: list[nn.Module] = []
    for stage, stride in enumerate(strides):
        stages_left = len(strides) - 1 - stage
        width = embed_dim
        if stages_left:
            width = max(embed_dim >> (2 if stem.startswith("conv_pool") else stages_left), 8)
        relu, pool = nn.ReLU(inplace=True), nn.MaxPool2d(3, stride, padding=1)
        if stem == "conv":
            layers += [nn.Conv2d(in_chans, width, 3, stride, padding=1), relu]
        elif stem == "conv_residual":
            convolution = nn.Conv2d(in_chans, width, 3, padding=1, bias=False)
            layers += [*([pool] if stage else []), convolution, relu, ResidualConv(width)]
        else:
            # Pooling and ReLU commute. In this order ReLU has a quarter of the values.
            layers += [nn.Conv2d(in_chans, width, 3, padding=1, bias=False), pool, relu]
        in_chans = width

    projection: nn.Module = nn.Identity()
    if stem == "conv":
        projection = nn.Conv2d(embed_dim, embed_dim, 1)
    elif stem == "conv_pool_residual":
        projection = ResidualConv(embed_dim)
    return nn.Sequential(*layers), projection


class ResidualConv(nn.Module):
    """features + relu(conv(features)), 3×3."""

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(embed_dim, embed_dim, 3, padding=1, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        return features + F.relu(self.conv(features))
