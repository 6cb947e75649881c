"""The colours of maps: the scale of a map, and its values as colours.

Values are in multiples of the average patch.
"""

from collections.abc import Sequence
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


def fit_scale(maps: Sequence[Float[np.ndarray, "..."]], *, signed: bool) -> ColourScale:
    """Return a scale from the lowest to the highest value of the maps, symmetric about zero if
    signed."""
    low = min(float(values.min()) for values in maps)
    high = max(float(values.max()) for values in maps)
    if signed:
        high = max(abs(low), abs(high))
        low = -high
    return ColourScale(low, high, signed)


def relative_to_uniform(values: PatchMap) -> PatchMap:
    """Return a map in multiples of the average patch, in absolute values."""
    total = float(np.abs(values).sum())
    return values * np.float32(values.size / total) if total > 0 else values


def quantise(
    values: Float[np.ndarray, "*shape"], *, low: float, high: float
) -> UInt8[np.ndarray, "*shape"]:
    """Convert values to 0 (low) to 255 (high); a constant map becomes the middle."""
    fraction = (values - low) / (high - low) if high > low else np.full_like(values, 0.5)
    cells: np.ndarray = (np.clip(fraction, 0, 1) * 255).round().astype(np.uint8)
    return cells


@lru_cache
def palette(*, signed: bool) -> UInt8[np.ndarray, "256 3"]:
    """Return the colours of 0 to 255."""
    with Image.open(_PALETTES) as picture:
        colours: np.ndarray = np.asarray(picture.convert("RGB"))[int(signed)]
    return colours


def draw_heat(values: Float[np.ndarray, "height width"], scale: ColourScale) -> Image.Image:
    """Draw values as colours; a constant map gets the middle colour."""
    picture = Image.fromarray(quantise(values, low=scale.low, high=scale.high))
    # Pillow applies colours faster than numpy, and without the GIL
    picture.putpalette(palette(signed=scale.signed).tobytes())
    return picture.convert("RGB")
