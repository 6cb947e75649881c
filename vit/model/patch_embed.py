"""From pixels to patch tokens: a linear map or a convolutional stem, and position embeddings."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vit.model.stem import build_stem
from vit.runtime.arguments import Size, as_pair, check_choice
from vit.runtime.device import cpu_multiplies_bfloat16
from vit.runtime.tensors import Images
from vit.runtime.threads import constant_when_compiled

STEMS = ("conv", "conv_pool", "conv_pool_residual", "conv_residual", "patch")


class PatchEmbed(nn.Module):
    """Cuts the image into patches and embeds each: [B, C, H, W] → [B, P, D], row by row.

    All stems end on the patch grid, so a convolutional one needs patch sides that are powers of
    two, from 2:

    - "patch": one linear map per patch (Dosovitskiy et al. 2021).
    - "conv": 3×3 convolutions of stride 2 with ReLU, widths doubling up to D, then a 1×1 one (Xiao
      et al. 2021, without batch norm, so that no sample's result depends on its batch).
    - "conv_pool": 3×3 convolutions, ReLU and 3×3 max pooling of stride 2, D/4 wide, the last D
      (Hassani et al. 2021, CCT).
    - "conv_pool_residual": the same, then features + relu(conv3×3(features)) (He et al. 2016).
    - "conv_residual": a 3×3 convolution with ReLU and a residual one, on the pixels and again after
      each max pooling, with widths doubling up to D.

    Args:
        img_size: Pixels of both sides, or (height, width); the patch must divide the image.
        patch_size: See `img_size`.
        in_chans: Channels of the images.
        embed_dim: Width of the tokens.
        stem: One of the names above.

    Raises:
        ValueError: The stem is unknown, or the sides don't fit.
    """

    def __init__(
        self,
        img_size: Size,
        patch_size: Size,
        *,
        in_chans: int,
        embed_dim: int,
        stem: str = "patch",
    ) -> None:
        super().__init__()
        self.patch_size = as_pair(patch_size, name="patch_size")
        self.in_chans = in_chans
        self.set_input_size(img_size)

        check_choice(stem, STEMS, name="stem")
        self.stem: nn.Module = nn.Identity()
        self.proj: nn.Module
        if stem == "patch":
            self.proj = nn.Conv2d(in_chans, embed_dim, self.patch_size, stride=self.patch_size)
            return
        if any(side & (side - 1) for side in self.patch_size) or max(self.patch_size) < 2:
            raise ValueError(
                f"a convolutional stem halves the image, so patch_size {self.patch_size} must be "
                "powers of two; try 2, 4, 8 or 16, or stem 'patch'"
            )
        self.stem, self.proj = build_stem(stem, in_chans, embed_dim, self.patch_size)

    @property
    def grid_size(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        return self.img_size[0] // self.patch_size[0], self.img_size[1] // self.patch_size[1]

    def set_input_size(self, img_size: Size, patch_size: Size | None = None) -> None:
        """Change the size of images and patches. See `VisionTransformer.set_input_size`."""
        sides = as_pair(img_size, name="img_size")
        patches = self.patch_size
        if patch_size is not None:
            patches = as_pair(patch_size, name="patch_size")
        for side, patch in zip(sides, patches, strict=True):
            if side % patch:
                lower = side // patch * patch
                nearest = f"{lower} or {lower + patch}" if lower else str(patch)
                raise ValueError(
                    f"img_size {side} is not a multiple of patch_size {patch}; try {nearest}"
                )
        self._resample_patches(patches)
        self.img_size = sides

    def _resample_patches(self, patch_size: tuple[int, int]) -> None:
        """Resample the kernel, so that resized patches get nearly the same embedding.

        The pseudo-inverse of the resizing does this (Beyer et al. 2023, FlexiViT, equation 4).
        """
        if patch_size == self.patch_size:
            return
        if not isinstance(self.stem, nn.Identity):
            raise ValueError(
                f"a convolutional stem makes patches of {self.patch_size}, which can't be resampled "
                f"to {patch_size}; set patch_size to {list(self.patch_size)}"
            )
        # timm takes seconds to import.
        from timm.layers import resample_patch_embed

        assert isinstance(self.proj, nn.Conv2d)
        old = self.proj.weight
        kernel = resample_patch_embed(old.detach(), list(patch_size))
        self.proj.weight = nn.Parameter(kernel, requires_grad=old.requires_grad)
        self.proj.kernel_size = patch_size
        self.proj.stride = patch_size
        self.patch_size = patch_size

    def forward(self, images: Images) -> Float[Tensor, "B P D"]:
        """Embed images. In training mode their sides may be any multiples of the patch."""
        expected = self.img_size
        if self.training and not any(
            side % patch for side, patch in zip(images.shape[2:], self.patch_size, strict=True)
        ):
            height, width = images.shape[2:]
            expected = (height, width)
        if images.shape[1:] != (self.in_chans, *expected):
            raise ValueError(
                f"images of shape {list(images.shape[1:])} (channels, height, width) given to a "
                f"model for {[self.in_chans, *self.img_size]}; call set_input_size for another size"
            )
        if isinstance(self.stem, nn.Identity):
            return self._patchify(images)
        # Compiled max pooling takes longer than all the rest of a small model.
        compiling = torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()
        convolve = _convolve_uncompiled if compiling and images.is_cpu else _convolve
        # Without bfloat16 instructions, the weight gradient of a convolution takes over ten times
        # as long in bfloat16 as in float32 (256 images, 32 px, 2 cores).
        in_float32 = images.is_cpu and not _has_bfloat16()
        with torch.autocast("cpu", enabled=False) if in_float32 else nullcontext():
            features = convolve(images, self.stem, self.proj)  # [B, D, rows, columns]
        return features.flatten(2).transpose(1, 2)  # [B, P, D]

    def _patchify(self, images: Images) -> Float[Tensor, "B P D"]:
        """Apply `proj` as one matrix product over flattened patches.

        It equals a convolution whose stride is its kernel size, and is 1.3 times as fast on a CPU
        (128 images of 64 patches, bfloat16, one core).
        """
        assert isinstance(self.proj, nn.Conv2d)
        height, width = self.patch_size
        rows = images.shape[2] // height
        columns = images.shape[3] // width
        patches = images.reshape(-1, self.in_chans, rows, height, columns, width)
        patches = patches.permute(0, 2, 4, 1, 3, 5)  # [B, rows, columns, C, height, width]
        patches = patches.flatten(3).flatten(1, 2)  # [B, P, C·height·width]
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


def _convolve(images: Tensor, stem: nn.Module, proj: nn.Module) -> Tensor:
    # Channels last is faster for 3×3 convolutions, and the tokens are then a view.
    features: Tensor = proj(stem(images.contiguous(memory_format=torch.channels_last)))
    return features


# torch.compiler.disable does the same, but first imports torch's compiler, which takes 3 s.
_convolve_uncompiled = torch._disable_dynamo(_convolve)  # type: ignore[attr-defined]


# A constant for the compiler: reading processor flags would break its graph.
@constant_when_compiled
def _has_bfloat16() -> bool:
    return cpu_multiplies_bfloat16()


def build_sincos_positions(grid_size: tuple[int, int], embed_dim: int) -> Float[Tensor, "1 P D"]:
    """Build fixed 2-D positions (Beyer et al. 2022, "Better plain ViT baselines").

    A quarter of the width each holds sin(x), cos(x), sin(y) and cos(y), with x the column, y the
    row and frequencies 10000^(-i / (D/4 - 1)).
    """
    if embed_dim % 4:
        raise ValueError(
            f"sincos positions need an embed_dim that is a multiple of 4, not {embed_dim}; "
            f"try {embed_dim // 4 * 4 + 4}"
        )
    # A model on "meta" computes them on the CPU too: on "meta", torch would import its compiler,
    # which takes 3 s.
    rows, columns, exponents = (
        torch.arange(count, dtype=torch.float64, device="cpu")
        for count in (*grid_size, embed_dim // 4)
    )
    frequencies = 10_000 ** -(exponents / max(len(exponents) - 1, 1))  # [D/4]
    y, x = (
        side.flatten()[:, None] * frequencies  # [P, D/4]
        for side in torch.meshgrid(rows, columns, indexing="ij")
    )
    positions = torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)
    return positions.float()[None].to(torch.get_default_device())


def resample_positions(
    positions: Float[Tensor, "1 N D"],
    *,
    old_grid: tuple[int, int],
    new_grid: tuple[int, int],
    num_prefix_tokens: int,
) -> Float[Tensor, "1 M D"]:
    """Resample learned positions to another grid, by antialiased bicubic interpolation as in timm.

    Args:
        positions: [1, N, D], the prefix tokens first, then the patches row by row.
        old_grid, new_grid: Rows and columns of patches.
        num_prefix_tokens: Number of leading positions that stay as they are.
    """
    assert positions.shape[1] == num_prefix_tokens + old_grid[0] * old_grid[1]
    if old_grid == new_grid:
        return positions
    prefix = positions[:, :num_prefix_tokens]
    grid = positions[0, num_prefix_tokens:].reshape(*old_grid, -1).float()  # [rows, columns, D]
    with torch.autocast(positions.device.type, enabled=False):
        for axis in (0, 1):
            weights = _build_resampling_weights(old_grid[axis], new_grid[axis], grid.device)
            grid = torch.tensordot(weights, grid, dims=([1], [axis])).movedim(0, axis)
    return torch.cat([prefix, grid.flatten(0, 1)[None].to(prefix)], dim=1)


def _build_resampling_weights(
    old_length: int, new_length: int, device: torch.device
) -> Float[Tensor, "new old"]:
    """Build the matrix of antialiased bicubic interpolation along one axis.

    `F.interpolate` has no deterministic backward pass on GPUs, and `train.deterministic` needs one.
    """
    identity = torch.eye(old_length, device=device)[None, None]
    weights = F.interpolate(
        identity, size=(new_length, old_length), mode="bicubic", antialias=True, align_corners=False
    )
    return weights[0, 0]
