"""One of fourteen operations for each sample, those of RandAugment and TrivialAugment.

Ranges are torchvision's. `strength` in 0..1 becomes an operation's magnitude, randomly signed if it has a direction.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vit.data import kernels
from vit.data.kernels import Factors, Images, Integers, Size
from vit.data.random import SampleIds, StatelessRandom


@dataclass(frozen=True)
class Ranges:
    """Magnitudes at strength 1."""

    shear: float  # tangent of the angle
    translate_fraction: float  # of the image's side, in addition to
    translate_pixels: float
    rotate: float  # degrees
    enhance: float  # brightness, colour, contrast and sharpness factors are 1 ± this
    posterize: int  # bits lost


RAND_AUGMENT = Ranges(0.3, 150 / 331, translate_pixels=0.0, rotate=30.0, enhance=0.9, posterize=4)
TRIVIAL_AUGMENT = Ranges(0.99, 0.0, translate_pixels=32.0, rotate=135.0, enhance=0.99, posterize=6)

_GEOMETRIC = ("identity", "shear x", "shear y", "translate x", "translate y", "rotate")
_ENHANCING: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": kernels.adjust_brightness,
    "color": kernels.adjust_saturation,
    "contrast": kernels.adjust_contrast,
    "sharpness": kernels.adjust_sharpness,
}
OPERATIONS = (*_GEOMETRIC, *_ENHANCING, "posterize", "solarize", "autocontrast", "equalize")


def apply_operations(
    images: Images, rng: StatelessRandom, ids: SampleIds, strength: Factors, *, stream: str, ranges: Ranges
) -> Images:
    """Apply an operation drawn for each sample; the sample `ids` and `strength` are on the host."""
    chosen = rng.integers(stream, ids, below=len(OPERATIONS))
    signed = torch.where(rng.bits(f"{stream} sign", ids) < 0, -strength, strength)
    result = images.clone()
    # the host knows who gets what, so that no list of indices is ever read back from the device
    for number in range(len(_GEOMETRIC), len(OPERATIONS)):
        members = torch.nonzero(chosen == number).flatten()
        if len(members):
            place, name = members.to(images.device, non_blocking=True), OPERATIONS[number]
            result[place] = _recolor(name, images[place], strength[members], signed[members], ranges=ranges)
    moved = torch.nonzero((chosen > 0) & (chosen < len(_GEOMETRIC))).flatten()
    if len(moved):
        matrices = compute_matrices(
            chosen[moved], signed[moved], ranges=ranges, size=(images.shape[2], images.shape[3])
        )
        place = moved.to(images.device, non_blocking=True)
        result[place] = kernels.affine(images[place], matrices.to(images.device, non_blocking=True))
    return result


def compute_matrices(chosen: Integers, signed: Factors, *, ranges: Ranges, size: Size) -> Float[Tensor, "B 2 3"]:
    """From output to input coordinates, measured from the centre, for operations 0 … 5."""
    height, width = size

    def only(name: str, reach: float) -> Tensor:
        return torch.where(chosen == OPERATIONS.index(name), signed * reach, 0.0)

    def shift(axis: str, side: int) -> Tensor:
        return only(f"translate {axis}", ranges.translate_fraction * side + ranges.translate_pixels).trunc()

    angle = only("rotate", math.radians(ranges.rotate))
    shear_x, shear_y = only("shear x", ranges.shear), only("shear y", ranges.shear)
    # shears leave the upper left corner where it is, so they move the centre
    across = [angle.cos(), shear_x - angle.sin(), shear_x * height / 2 - shift("x", width)]
    down = [shear_y + angle.sin(), angle.cos(), shear_y * width / 2 - shift("y", height)]
    return torch.stack([torch.stack(across, dim=1), torch.stack(down, dim=1)], dim=1)


def _recolor(name: str, images: Tensor, strength: Tensor, signed: Tensor, *, ranges: Ranges) -> Tensor:
    if name in ("autocontrast", "equalize"):
        return kernels.equalize(images) if name == "equalize" else kernels.autocontrast(images)
    operation: Callable[[Tensor, Tensor], Tensor]
    if name == "posterize":
        operation, magnitude = kernels.posterize, 8 - (strength * ranges.posterize).round()
    elif name == "solarize":
        operation, magnitude = kernels.solarize, 255 * (1 - strength)
    else:
        operation, magnitude = _ENHANCING[name], 1 + signed * ranges.enhance
    return operation(images, magnitude.to(images.device, non_blocking=True))
