"""Convolutional stems, which halve the image down to the patch grid."""

import torch.nn.functional as F
from torch import Tensor, nn

STEMS = ("conv", "conv_pool", "conv_pool_residual", "conv_residual", "patch")


def build_stem(
    stem: str, in_chans: int, embed_dim: int, patch_side: int
) -> tuple[nn.Sequential, nn.Module]:
    """Build a stem, and the layer that follows it on the patch grid. The side of a patch is a power
    of two.

    - "conv": 3×3 convolutions of stride 2 with ReLU, widths doubling up to D, then a 1×1 one (Xiao
      et al. 2021, without batch norm, so that no sample's result depends on its batch).
    - "conv_pool": 3×3 convolutions, ReLU and 3×3 max pooling of stride 2, D/4 wide, the last D
      (Hassani et al. 2021, CCT).
    - "conv_pool_residual": the same, then a residual convolution.
    - "conv_residual": a 3×3 convolution with ReLU and a residual one, on the pixels and again after
      each max pooling, with widths doubling up to D.
    """
    num_stages = patch_side.bit_length() - 1
    if stem == "conv_residual":
        num_stages += 1  # its first stage is on the pixels
    layers: list[nn.Module] = []
    for stage in range(num_stages):
        stages_left = num_stages - 1 - stage
        width = embed_dim
        if stages_left:
            width = max(embed_dim >> (2 if stem.startswith("conv_pool") else stages_left), 8)
        relu, pool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)
        if stem == "conv":
            layers += [nn.Conv2d(in_chans, width, 3, 2, padding=1), relu]
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
    """features + relu(conv(features)), 3×3 (He et al. 2016)."""

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(embed_dim, embed_dim, 3, padding=1, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        return features + F.relu(self.conv(features))
