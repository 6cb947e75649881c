"""The colours of maps: the scale of a map, and its values as colours.

Values are in multiples of the average patch.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

PatchMap = Float[np.ndarray, "rows columns"]
# a map whose maximum is lower is drawn flat: stretched to the whole range of the colours,
# differences of a few percent would look like an object
FLAT_BELOW = 1.2
# matplotlib's inferno and RdYlBu_r, a row each, because importing matplotlib takes half a second:
# readable with any colour vision, and bright on dark photos; blue is negative, red positive
_PALETTES = Path(__file__).with_name("palettes.png")
# the darkest colours of the sequential map would hide the photo instead of marking it
_FIRST_COLOUR = 0.35
_FLAT_STRENGTH = 0.15
# exponent of a value's opacity: in proportion (1), middle values couldn't be seen on small pictures
_STRENGTH_EXPONENT = 0.7


@dataclass(frozen=True)
class ColourScale:
    """The values at the ends of the colours.

    Attributes:
        low: Lowest value, in multiples of the average patch; for a signed map, minus the highest.
        high: Highest value.
        signed: True if zero is the middle of the colours.
    """

    low: float
    high: float
    signed: bool

    @property
    def is_flat(self) -> bool:
        """True if the map is nearly even, so that its differences are not drawn."""
        return not self.signed and self.high < FLAT_BELOW


def fit_scale(values: PatchMap, *, signed: bool) -> ColourScale:
    """Return a scale from the lowest to the highest value, symmetric about zero if signed."""
    low, high = float(values.min()), float(values.max())
    if signed:
        high = max(abs(low), abs(high))
        low = -high
    return ColourScale(low, high, signed)


def relative_to_uniform(values: PatchMap) -> PatchMap:
    """Return a map in multiples of the average patch, in absolute values."""
    total = float(np.abs(values).sum())
    return values * np.float32(values.size / total) if total > 0 else values


def shade(
    values: Float[np.ndarray, "height width"], scale: ColourScale
) -> tuple[Image.Image, Float[np.ndarray, "height width"]]:
    """Return the colour of each value, and its strength: 0 (the photo is visible) to 1."""
    if scale.is_flat:
        strength = np.full_like(values, _FLAT_STRENGTH)
    elif scale.signed:
        strength = np.clip(np.abs(values) / (scale.high or 1), 0, 1)
    else:
        strength = np.clip((values - scale.low) / (scale.high - scale.low), 0, 1)
    if scale.signed:
        # from the middle of each half of the colours, but not to its end: paler colours would
        # whiten the photo, darker ones hide it
        fractions = 0.5 + np.sign(values) * (0.25 + 0.15 * strength)
    else:
        fractions = _FIRST_COLOUR + (1 - _FIRST_COLOUR) * strength
    heat = Image.fromarray((255 * fractions).round().astype(np.uint8))
    # Pillow applies colours faster than numpy, and without the GIL
    heat.putpalette(palette(signed=scale.signed).tobytes())
    return heat.convert("RGB"), strength**_STRENGTH_EXPONENT


@lru_cache
def palette(*, signed: bool) -> UInt8[np.ndarray, "256 3"]:
    """Return the colours of 0 to 255."""
    with Image.open(_PALETTES) as picture:
        colours: np.ndarray = np.asarray(picture.convert("RGB"))[int(signed)]
    return colours
