"""Image operations on whole batches, each sample with its own parameters.

Pixels are 0..255: uint8 [B, H, W, 3] as stored, or float [B, 3, H, W] as the colour operations take and give them
(clamped, not rounded). Factors and magnitudes are float [B]. What each does to one image is torchvision's definition.
"""

from functools import lru_cache

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from torch.nn import functional as F

Size = tuple[int, int]  # height, width
Images = Float[Tensor, "B 3 H W"]  # 0..255
Stored = UInt8[Tensor, "n S T 3"]
Integers = Int64[Tensor, " B"]
Factors = Float[Tensor, " B"]


def gather_pixels(
    images: Stored, index: Integers, rows: Int64[Tensor, "B H"], columns: Int64[Tensor, "B W"]
) -> UInt8[Tensor, "B H W 3"]:
    """Pixel (rows[b, y], columns[b, x]) of image index[b]: cropping, shifting and flipping in one read."""
    height, width = images.shape[1:3]
    places = (index[:, None] * height + rows)[:, :, None] * width + columns[:, None, :]  # [B, H, W]
    # index_select of 3-byte rows took a sixth of the time of images[index, rows, columns] on a CPU
    return images.view(-1, 3).index_select(0, places.flatten()).view(*places.shape, 3)


def resized_crop(pixels: UInt8[Tensor, "B S T 3"], boxes: Float[Tensor, "B 4"], size: Size) -> Images:
    """Cut out (left, top, right, bottom), whole numbers, and scale to size, bilinear and antialiased."""
    left, top, right, bottom = boxes.unbind(1)
    down = _resize_weights(top, bottom, source=pixels.shape[1], target=size[0])  # [B, H, S]
    across = _resize_weights(left, right, source=pixels.shape[2], target=size[1])  # [B, W, T]
    lines = torch.bmm(down, pixels.flatten(2).float())  # [B, H, T * 3]
    lines = lines.view(len(pixels), size[0], -1, 3).permute(0, 3, 1, 2).flatten(1, 2)  # [B, 3 * H, T]
    return torch.bmm(lines, across.transpose(1, 2)).view(len(pixels), 3, *size)


def _resize_weights(start: Factors, stop: Factors, *, source: int, target: int) -> Float[Tensor, "B target source"]:
    """Rows of a triangle filter that sum to one; its half width is the larger of the two pixels."""
    scale = ((stop - start) / target)[:, None, None]
    centre = start[:, None, None] + (torch.arange(target, device=start.device)[:, None] + 0.5) * scale
    pixel = torch.arange(source, device=start.device) + 0.5
    weights = (1 - (pixel - centre).abs() / scale.clamp(min=1)).clamp(min=0)  # [B, target, source]
    weights = weights * ((pixel > start[:, None, None]) & (pixel < stop[:, None, None]))
    return weights / weights.sum(dim=2, keepdim=True)


def affine(images: Images, matrices: Float[Tensor, "B 2 3"]) -> Images:
    """Output pixel (x, y), from the centre, is the input's at matrix · (x, y, 1); bilinear, black outside."""
    height, width = images.shape[-2:]
    theta = matrices.clone()
    theta[:, 0, 1] *= height / width  # affine_grid's axes run from -1 to 1, whatever the aspect
    theta[:, 1, 0] *= width / height
    theta[:, 0, 2] *= 2 / width
    theta[:, 1, 2] *= 2 / height
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _blend(images: Tensor, other: Tensor, factor: Factors) -> Images:
    """`other` at factor 0, the image at 1, beyond it above 1."""
    return (other + factor[:, None, None, None] * (images - other)).clamp(0, 255)


def to_grey(images: Images) -> Float[Tensor, "B 1 H W"]:
    """Luma: ITU-R 601-2, as in torchvision."""
    return torch.einsum("bchw,c->bhw", images, _luma_weights(images.device, images.dtype))[:, None]


@lru_cache
def _luma_weights(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor((0.2989, 0.587, 0.114), device=device, dtype=dtype)  # a copy to the device, so made once


def adjust_brightness(images: Images, factor: Factors) -> Tensor:
    """Towards black."""
    return (images * factor[:, None, None, None]).clamp(0, 255)


def adjust_contrast(images: Images, factor: Factors) -> Tensor:
    """Towards the mean luma."""
    return _blend(images, to_grey(images).mean(dim=(2, 3), keepdim=True), factor)


def adjust_saturation(images: Images, factor: Factors) -> Tensor:
    """Towards grey."""
    return _blend(images, to_grey(images), factor)


def adjust_sharpness(images: Images, factor: Factors) -> Tensor:
    """Towards a 3×3 blur; the outermost pixels stay."""
    kernel = torch.ones(3, 1, 3, 3, device=images.device, dtype=images.dtype)
    kernel[:, :, 1, 1] = 5
    blurred = images.clone()
    blurred[:, :, 1:-1, 1:-1] = F.conv2d(images, kernel / 13, groups=3)
    return _blend(images, blurred, factor)


def posterize(images: Images, bits: Factors) -> Tensor:
    """Keep the upper `bits` (0..8) of each value."""
    step = 2 ** (8 - bits[:, None, None, None])
    return (images.round() / step).floor() * step


def solarize(images: Images, threshold: Factors) -> Tensor:
    """Invert the values from the threshold on."""
    return torch.where(images >= threshold[:, None, None, None], 255 - images, images)


def autocontrast(images: Images) -> Tensor:
    """Stretch each channel to 0..255; a channel of one value stays."""
    low = images.amin(dim=(2, 3), keepdim=True)
    span = images.amax(dim=(2, 3), keepdim=True) - low
    return torch.where(span > 0, (images - low) * (255 / span.clamp(min=1e-3)), images).clamp(0, 255)


def equalize(images: Images) -> Tensor:
    """Flatten each channel's histogram, by Pillow's integer rule."""
    values = images.round().long().flatten(2)  # [B, 3, P]
    histogram = torch.zeros(*values.shape[:2], 256, dtype=torch.int64, device=values.device)
    histogram.scatter_add_(2, values, torch.ones_like(values))
    # the step leaves out the pixels of the brightest value that occurs
    step = (values.shape[2] - histogram.gather(2, values.amax(dim=2, keepdim=True))) // 255
    above = histogram.cumsum(dim=2) - histogram  # pixels darker than each value
    table = ((above + step // 2) // step.clamp(min=1)).clamp(0, 255)
    return torch.where(step > 0, table.gather(2, values), values).to(images.dtype).view_as(images)


def outside_boxes(boxes: Int64[Tensor, "B 4"], size: Size) -> Tensor:
    """Bool [B, 1, H, W]: false inside (left, top, right, bottom), which may reach over the edges."""
    left, top, right, bottom = boxes[:, :, None].unbind(1)
    rows, columns = (torch.arange(side, device=boxes.device) for side in size)
    inside = ((rows >= top) & (rows < bottom))[:, :, None] & ((columns >= left) & (columns < right))[:, None]
    return ~inside[:, None]
