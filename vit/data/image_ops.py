"""The augmentation of a batch, computed on its device by what `vit.data.augment` has drawn."""

from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor
from torch.nn import functional as F

from vit.data.augment import AugmentParams, Boxes
from vit.data.preprocess import Preprocess
from vit.runtime.tensors import Images


def augment_images(
    stored: UInt8[Tensor, "n S T 3"],
    rows: Int64[Tensor, " B"],
    params: AugmentParams,
    *,
    preprocess: Preprocess,
    size: tuple[int, int],
) -> Float[Tensor, "B 3 H W"]:
    """Crop, flip, recolour, normalise and erase stored[rows]; everything is on one device. `size`,
    height and width, is that of a schedule of sizes."""
    if params.crops is not None:
        pixels = resized_crop(stored.index_select(0, rows), params.crops, size)
        pixels = torch.where(params.is_flipped[:, None, None, None], pixels.flip(3), pixels)
    else:
        cropped = _crop_and_flip(stored, rows, params, preprocess.image_size).permute(0, 3, 1, 2)
        pixels = cropped.to(torch.float32, memory_format=torch.contiguous_format)
        if pixels.shape[-2:] != size:
            pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True)
    if params.color_factors is not None:
        pixels = jitter_colors(pixels, params.color_factors)

    # in place: the pixels are a copy of the stored ones by now
    scale, shift = preprocess.scale_and_shift(pixels.device)
    images = pixels.mul_(scale).add_(shift)
    # 0 is the mean colour once pixels are normalised
    if params.erased_boxes is not None:
        images *= _outside_boxes(params.erased_boxes, size)
    return images


def _crop_and_flip(
    stored: UInt8[Tensor, "n S T 3"],
    rows: Int64[Tensor, " B"],
    params: AugmentParams,
    size: tuple[int, int],
) -> UInt8[Tensor, "B H W 3"]:
    """Cut out the centres, shifted and flipped: one choice of lines and columns, so that pixels are
    read once."""
    down, right = params.shifts
    lines = _find_lines(down, stored=stored.shape[1], cropped=size[0])
    columns = _find_lines(right, stored=stored.shape[2], cropped=size[1])
    columns = torch.where(params.is_flipped[:, None], columns.flip(1), columns)
    lines = rows[:, None] * stored.shape[1] + lines
    pixels = lines[:, :, None] * stored.shape[2] + columns[:, None, :]  # [B, H, W]
    # index_select of 3-byte rows took a sixth of the time of stored[rows, lines, columns] on a CPU
    return stored.view(-1, 3).index_select(0, pixels.flatten()).view(*pixels.shape, 3)


def _find_lines(
    shifts: Int64[Tensor, " B"], *, stored: int, cropped: int
) -> Int64[Tensor, "B cropped"]:
    """Find the lines or columns of the centre crop, moved by `shifts` and reflected at the edge."""
    lines = (stored - cropped) // 2 + torch.arange(cropped, device=shifts.device)
    lines = lines + shifts[:, None]
    period = max(2 * (stored - 1), 1)
    # folded back in, without repeating the edge
    return torch.minimum(lines % period, period - lines % period)


def resized_crop(
    images: UInt8[Tensor, "B S T 3"], boxes: Float[Tensor, "B 4"], size: tuple[int, int]
) -> Images:
    """Cut out boxes (left, top, right, bottom) and scale them to `size` (height, width), bilinear
    and antialiased."""
    left, top, right, bottom = boxes.unbind(1)
    row_weights = _resize_weights(top, bottom, images.shape[1], size[0])  # [B, H, S]
    column_weights = _resize_weights(left, right, images.shape[2], size[1])  # [B, W, T]

    # a resize is two matrix products, with matrices of each sample's own
    rows = torch.bmm(row_weights, images.flatten(2).float())  # [B, H, T * 3]
    rows = rows.view(*rows.shape[:2], -1, 3).permute(0, 3, 1, 2).flatten(1, 2)  # [B, 3 * H, T]
    return torch.bmm(rows, column_weights.transpose(1, 2)).view(len(images), 3, *size)


def _resize_weights(
    start: Float[Tensor, " B"], stop: Float[Tensor, " B"], source: int, target: int
) -> Float[Tensor, "B target source"]:
    """Rows of a triangle filter that sum to one; its half width is the larger of the two pixels."""
    start, stop = start[:, None, None], stop[:, None, None]
    scale = (stop - start) / target
    centre = start + (torch.arange(target, device=start.device)[:, None] + 0.5) * scale
    pixel = torch.arange(source, device=start.device) + 0.5
    weights = (1 - (pixel - centre).abs() / scale.clamp(min=1)).clamp(min=0)  # [B, target, source]
    # nothing beyond the box, as if it had been cut out first
    weights = weights * ((pixel > start) & (pixel < stop))
    return weights / weights.sum(dim=2, keepdim=True)


def _outside_boxes(boxes: Boxes, size: tuple[int, int]) -> Bool[Tensor, "B 1 H W"]:
    """Mask of each image: false inside its box, which may reach over the edges."""
    left, top, right, bottom = boxes[:, :, None].unbind(1)
    rows, columns = (torch.arange(side, device=boxes.device) for side in size)
    in_rows = (rows >= top) & (rows < bottom)  # [B, H]
    in_columns = (columns >= left) & (columns < right)  # [B, W]
    return ~(in_rows[:, :, None] & in_columns[:, None])[:, None]


def jitter_colors(images: Images, factors: Float[Tensor, "3 B"]) -> Images:
    """Change brightness, contrast and saturation, in this order, as torchvision's ColorJitter does.

    At a factor of 0 the image is black, its mean luma, or grey; at 1 it stays as it is.
    """
    brightness, contrast, saturation = factors[:, :, None, None, None].unbind()
    images = (images * brightness).clamp(0, 255)
    mean = to_grey(images).mean(dim=(2, 3), keepdim=True)
    images = (mean + contrast * (images - mean)).clamp(0, 255)
    grey = to_grey(images)
    return (grey + saturation * (images - grey)).clamp(0, 255)


def to_grey(images: Images) -> Float[Tensor, "B 1 H W"]:
    """Compute luma by ITU-R 601-2, as torchvision does."""
    return torch.einsum("bchw,c->bhw", images, _luma_weights(images.device))[:, None]


# cached, because each call would copy them to the device
@lru_cache
def _luma_weights(device: torch.device) -> Tensor:
    return torch.tensor((0.2989, 0.587, 0.114), device=device)


def mix_batch(
    images: Images,
    targets: Int64[Tensor, " B"] | Float[Tensor, "B C"],
    own_weight: Float[Tensor, " B"],
    boxes: Boxes,
    *,
    num_classes: int,
) -> tuple[Images, Float[Tensor, "B C"]]:
    """Mix each normalised image with its neighbour; return the images and their targets. Labels
    become class weights, rows are mixed. The last of an odd batch stays as it is."""
    count, _, height, width = images.shape
    # 0 ↔ 1, 2 ↔ 3, …
    partner = (torch.arange(count, device=images.device) ^ 1).clamp(max=count - 1)
    pixel_weight = own_weight[:, None, None, None] * _outside_boxes(boxes, (height, width))
    mixed = torch.lerp(images[partner], images, pixel_weight)

    if targets.ndim == 1:
        # `F.one_hot` would look at the labels on the host
        classes = torch.zeros(count, num_classes, device=targets.device)
        targets = classes.scatter_(1, targets[:, None], 1)
    # for cutmix the fraction of its own pixels, for mixup the weight itself
    weight = pixel_weight.mean(dim=(1, 2, 3))[:, None]
    return mixed, weight * targets + (1 - weight) * targets[partner]
