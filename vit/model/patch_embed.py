"""From pixels to patch tokens: a linear map or a convolutional stem, and position embeddings."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vit.model.stem import STEMS, build_stem
from vit.runtime.arguments import Size, as_pair, check_choice
from vit.runtime.tensors import Images


class PatchEmbed(nn.Module):
    """Cuts the image into patches and embeds each: [B, C, H, W] → [B, P, D], row by row.

    For the arguments see `VisionTransformer`. The stem "patch" is one linear map per patch
    (Dosovitskiy et al. 2021); others (`build_stem`) need a square patch whose side is a power of
    two, from 2.

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
        height, width = self.patch_size
        if height != width or height < 2 or height & (height - 1):
            raise ValueError(
                f"patch_size {self.patch_size}: a convolutional stem needs a power of two, such as 4"
            )
        self.stem, self.proj = build_stem(stem, in_chans, embed_dim, height)

    @property
    def grid_size(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        return self.img_size[0] // self.patch_size[0], self.img_size[1] // self.patch_size[1]

    def set_input_size(self, img_size: Size) -> None:
        """Change the size of images. See `VisionTransformer.set_input_size`."""
        sides = as_pair(img_size, name="img_size")
        larger = tuple(
            -(-side // patch) * patch for side, patch in zip(sides, self.patch_size, strict=True)
        )
        if sides != larger:
            raise ValueError(
                f"img_size {sides} is not a multiple of patch_size {self.patch_size}; try {larger}"
            )
        self.img_size = sides

    def forward(self, images: Images) -> Float[Tensor, "B P D"]:
        """Embed images. In training mode their sides may be any multiples of the patch."""
        height, width = images.shape[2:]
        fits = (height, width) == self.img_size
        if self.training:
            fits = not (height % self.patch_size[0] or width % self.patch_size[1])
        if images.shape[1] != self.in_chans or not fits:
            raise ValueError(
                f"images of shape {list(images.shape[1:])} (channels, height, width) given to a "
                f"model for {[self.in_chans, *self.img_size]}; call set_input_size for another size"
            )
        if isinstance(self.stem, nn.Identity):
            return self._patchify(images)
        # Channels last is faster for 3×3 convolutions, and the tokens are then a view.
        images = images.contiguous(memory_format=torch.channels_last)
        features: Tensor = self.proj(self.stem(images))  # [B, D, rows, columns]
        return features.flatten(2).transpose(1, 2)  # [B, P, D]

    def _patchify(self, images: Images) -> Float[Tensor, "B P D"]:
        """Apply `proj` as one matrix product over flattened patches, which is 1.3 times as fast on a
        CPU (128 images of 64 patches, bfloat16, one core)."""
        assert isinstance(self.proj, nn.Conv2d)
        height, width = self.patch_size
        rows = images.shape[2] // height
        columns = images.shape[3] // width
        patches = images.reshape(-1, self.in_chans, rows, height, columns, width)
        patches = patches.permute(0, 2, 4, 1, 3, 5)  # [B, rows, columns, C, height, width]
        patches = patches.flatten(3).flatten(1, 2)  # [B, P, C·height·width]
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


def build_sincos_positions(grid_size: tuple[int, int], embed_dim: int) -> Float[Tensor, "1 P D"]:
    """Build fixed 2-D positions (Beyer et al. 2022, "Better plain ViT baselines").

    A quarter of the width each holds sin(x), cos(x), sin(y) and cos(y), with x the column, y the
    row and frequencies 10000^(-i / (D/4 - 1)).
    """
    if embed_dim % 4:
        raise ValueError(f"sincos positions need an embed_dim that 4 divides, not {embed_dim}")
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
    """Resample learned positions to another grid of rows and columns, by antialiased bicubic
    interpolation as in timm. Those of the prefix tokens, which come first, stay as they are.

    `F.interpolate` has no deterministic backward pass on GPUs, and `train.deterministic` needs one.
    So it makes a matrix for each axis, which multiplies the positions.
    """
    assert positions.shape[1] == num_prefix_tokens + old_grid[0] * old_grid[1]
    if old_grid == new_grid:
        return positions
    prefix = positions[:, :num_prefix_tokens]
    grid = positions[0, num_prefix_tokens:].reshape(*old_grid, -1).float()  # [rows, columns, D]
    with torch.autocast(positions.device.type, enabled=False):
        for axis, (old, new) in enumerate(zip(old_grid, new_grid, strict=True)):
            identity = torch.eye(old, device=grid.device)[None, None]
            weights = F.interpolate(identity, (new, old), mode="bicubic", antialias=True)[0, 0]
            grid = torch.tensordot(weights, grid, dims=([1], [axis])).movedim(0, axis)
    return torch.cat([prefix, grid.flatten(0, 1)[None].to(prefix)], dim=1)
