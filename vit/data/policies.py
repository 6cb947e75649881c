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
_OPERATIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": kernels.adjust_brightness,
    "color": kernels.adjust_saturation,
    "contrast": kernels.adjust_contrast,
    "sharpness": kernels.adjust_sharpness,
    "posterize": kernels.posterize,
    "solarize": kernels.solarize,
    "autocontrast": lambda images, _: kernels.autocontrast(images),
    "equalize": lambda images, _: kernels.equalize(images),
    "affine": kernels.affine,
}
OPERATIONS = (*_GEOMETRIC, *list(_OPERATIONS)[:-1])


def draw_operations(
    rng: StatelessRandom, ids: SampleIds, strength: Factors, *, stream: str, ranges: Ranges, size: Size
) -> dict[str, Tensor]:
    """For each operation that is drawn, which samples get it and its magnitudes, on the host as `ids` and `strength`
    are: so that no list of indices is ever read back from the device."""
    chosen = rng.integers(stream, ids, below=len(OPERATIONS))
    signed = torch.where(rng.bits(f"{stream} sign", ids) < 0, -strength, strength)
    drawn = {}
    for number in range(len(_GEOMETRIC), len(OPERATIONS)):
        members, name = torch.nonzero(chosen == number).flatten(), OPERATIONS[number]
        if len(members):
            drawn[f"{stream} {name}"] = members
            drawn[f"{stream} {name} by"] = _magnitudes(name, strength[members], signed[members], ranges=ranges)
    moved = torch.nonzero((chosen > 0) & (chosen < len(_GEOMETRIC))).flatten()
    if len(moved):
        drawn[f"{stream} affine"] = moved
        drawn[f"{stream} affine by"] = compute_matrices(chosen[moved], signed[moved], ranges=ranges, size=size)
    return drawn


def apply_operations(images: Images, drawn: Mapping[str, Tensor], *, stream: str) -> Images:
    """What `draw_operations` drew, by then on the images' device."""
    result = images.clone()
    for name, operation in _OPERATIONS.items():
        place = drawn.get(f"{stream} {name}")
        if place is not None:
            result[place] = operation(images[place], drawn[f"{stream} {name} by"])
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


def _magnitudes(name: str, strength: Factors, signed: Factors, *, ranges: Ranges) -> Factors:
    if name == "posterize":
        return 8 - (strength * ranges.posterize).round()
    return 255 * (1 - strength) if name == "solarize" else 1 + signed * ranges.enhance
