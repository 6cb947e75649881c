"""From pixels to patch tokens: patchify or a convolutional stem, and fixed or resampled position embeddings."""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vit.runtime.arguments import as_pair, check_choice
from vit.runtime.device import cpu_multiplies_bfloat16

STEMS = ("conv", "conv_pool", "conv_pool_residual", "patch")
Size = int | Sequence[int]  # of both sides, or (height, width)


class PatchEmbed(nn.Module):
    """Cuts the image into patches and embeds each: [B, C, H, W] → [B, P, D], row by row. Stems:

    "patch": one linear map per patch (Dosovitskiy et al. 2021).
    "conv": 3×3 convolutions of stride 2 with ReLU, widths doubling up to D, then a 1×1 one (Xiao et al. 2021, without
    batch norm, so that no sample's result depends on its batch).
    "conv_pool": 3×3 convolutions, ReLU and 3×3 max pooling of stride 2, D/4 wide, the last D (Hassani et al. 2021, CCT)
    "conv_pool_residual": the same, then features + relu(conv3×3(features)) on the patch grid (He et al. 2016).
    All end on the patch grid, so a convolutional stem needs patch sides that are powers of two, from 2.
    """

    def __init__(self, img_size: Size, patch_size: Size, *, in_chans: int, embed_dim: int, stem: str = "patch") -> None:
        super().__init__()
        self.patch_size = as_pair(patch_size, name="patch_size")
        self.in_chans = in_chans
        self._cpu_has_bfloat16 = cpu_multiplies_bfloat16()
        self.dynamic_img_size = False  # lets images of other sizes through, for training on a few sizes
        self.set_input_size(img_size)
        check_choice(stem, STEMS, name="stem")
        self.stem: nn.Module = nn.Identity()
        if stem == "patch":
            self.proj: nn.Module = nn.Conv2d(in_chans, embed_dim, self.patch_size, stride=self.patch_size)
        elif stem == "conv":
            self.stem = _build_stem(in_chans, embed_dim, self.patch_size, pooled=False)
            self.proj = nn.Conv2d(embed_dim, embed_dim, 1)
        else:
            self.stem = _build_stem(in_chans, embed_dim, self.patch_size, pooled=True)
            self.proj = ResidualConv(embed_dim) if stem == "conv_pool_residual" else nn.Identity()

    @property
    def grid_size(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        return self.img_size[0] // self.patch_size[0], self.img_size[1] // self.patch_size[1]

    def set_input_size(self, img_size: Size) -> None:
        sides = as_pair(img_size, name="img_size")
        for side, patch in zip(sides, self.patch_size, strict=True):
            if side % patch:
                lower = side // patch * patch
                near = f"{lower} or {lower + patch}" if lower else str(patch)
                raise ValueError(f"img_size {side} is not a multiple of patch_size {patch}; try {near}")
        self.img_size = sides

    def forward(self, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B P D"]:
        expected = images.shape[2:] if self.dynamic_img_size else self.img_size
        if images.shape[1:] != (self.in_chans, *expected):
            given = f"images of shape {list(images.shape[1:])} (channels, height, width) given to a model for"
            raise ValueError(f"{given} {[self.in_chans, *self.img_size]}; call set_input_size for another size")
        if isinstance(self.stem, nn.Identity):
            return self._patchify(images)
        compiling = torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()
        run = _run_uncompiled if compiling and images.is_cpu else _run
        # without bfloat16 instructions oneDNN's fallback for a convolution's weight gradient took 1.4 to 2.0 s
        # where float32 took 0.05 to 0.12 s (256 images, 32 px, 2 cores)
        in_float32 = images.is_cpu and not self._cpu_has_bfloat16
        with torch.autocast("cpu", enabled=False) if in_float32 else nullcontext():
            # channels last: the faster layout of 3×3 convolutions, and the tokens below are then a view
            features = run(images.contiguous(memory_format=torch.channels_last), self.stem, self.proj)
        return features.flatten(2).transpose(1, 2)  # [B, D, rows, columns] → [B, P, D]

    def _patchify(self, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B P D"]:
        """`proj` as one matrix product over flattened patches, equal to a convolution whose stride is its kernel; in
        bfloat16 on a CPU its backward pass takes half the convolution's time or less."""
        assert isinstance(self.proj, nn.Conv2d)
        high, wide = self.patch_size
        rows, columns = images.shape[2] // high, images.shape[3] // wide
        patches = images.reshape(-1, self.in_chans, rows, high, columns, wide).permute(0, 2, 4, 1, 3, 5)
        return F.linear(patches.reshape(-1, rows * columns, self.in_chans * high * wide),
                        self.proj.weight.flatten(1), self.proj.bias)  # fmt: skip


class ResidualConv(nn.Module):
    """features + relu(conv(features)), 3×3, on the patch grid."""

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(embed_dim, embed_dim, 3, padding=1, bias=False)

    def forward(self, features: Float[Tensor, "B D rows columns"]) -> Float[Tensor, "B D rows columns"]:
        return features + F.relu(self.conv(features))


def _run(images: Tensor, stem: nn.Module, proj: nn.Module) -> Tensor:
    return cast(Tensor, proj(stem(images)))


# on CPUs, where compiled max pooling takes longer than all the rest of a small model; torch.compiler.disable, but it
# imports torch's compiler when it is called and not before
_run_uncompiled = torch._disable_dynamo(_run)  # type: ignore[attr-defined]


def _build_stem(in_chans: int, embed_dim: int, patch_size: tuple[int, int], *, pooled: bool) -> nn.Sequential:
    """3×3 convolutions with ReLU; max pooling or their own stride halves the image down to the patch grid."""
    if any(side & (side - 1) for side in patch_size) or max(patch_size) < 2:
        reason = f"a convolutional stem halves the image, so patch_size {patch_size} must be powers of two"
        raise ValueError(f"{reason}; try 2, 4, 8 or 16, or stem 'patch'")
    rows, columns = (side.bit_length() - 1 for side in patch_size)  # halvings
    stages = range(max(rows, columns))
    strides = [(1 + (stage < rows), 1 + (stage < columns)) for stage in stages]
    narrowings = [2 * (stage < stages[-1]) if pooled else stages[-1] - stage for stage in stages]
    widths = [in_chans, *(max(embed_dim >> halvings, 8) if halvings else embed_dim for halvings in narrowings)]
    layers: list[nn.Module] = []
    for stride, (narrow, wide) in zip(strides, pairwise(widths), strict=True):
        convolution = nn.Conv2d(narrow, wide, 3, 1 if pooled else stride, padding=1, bias=not pooled)
        # pooling and ReLU give the same in either order; this one leaves ReLU a quarter of the values
        layers += [convolution, nn.MaxPool2d(3, stride=stride, padding=1)] if pooled else [convolution]
        layers += [nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def build_sincos_positions(grid_size: tuple[int, int], embed_dim: int) -> Float[Tensor, "1 P D"]:
    """Fixed 2-D positions: a quarter of the width each for sin(x), cos(x), sin(y), cos(y), with frequencies
    10000^(-i / (D/4 - 1)), x the column and y the row (Beyer et al. 2022, "Better plain ViT baselines")."""
    if embed_dim % 4:
        raise ValueError(f"sincos positions need embed_dim in fours, not {embed_dim}; try {embed_dim // 4 * 4 + 4}")
    # of a model on "meta" too: to compute there, torch imports its compiler, 3 s
    quarter, sides = embed_dim // 4, (torch.arange(side, dtype=torch.float64, device="cpu") for side in grid_size)
    rows, columns = torch.meshgrid(*sides, indexing="ij")
    frequencies = 10_000 ** -(torch.arange(quarter, dtype=torch.float64, device="cpu") / max(quarter - 1, 1))
    x, y = columns.flatten()[:, None] * frequencies, rows.flatten()[:, None] * frequencies  # [P, D/4]
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).float()[None].to(torch.get_default_device())


def resample_positions(
    positions: Float[Tensor, "1 N D"], *, old_grid: tuple[int, int], new_grid: tuple[int, int], num_prefix_tokens: int
) -> Float[Tensor, "1 M D"]:
    """Learned positions for another grid: antialiased bicubic interpolation, as timm's; prefix tokens keep theirs."""
    assert positions.shape[1] == num_prefix_tokens + old_grid[0] * old_grid[1]
    if old_grid == new_grid:
        return positions
    prefix, grid = positions[:, :num_prefix_tokens], positions[:, num_prefix_tokens:]
    planes = grid.float().transpose(1, 2).reshape(1, -1, *old_grid)  # [1, D, rows, columns]
    planes = F.interpolate(planes, size=new_grid, mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([prefix, planes.flatten(2).transpose(1, 2).to(prefix)], dim=1)
