"""From a map on the patch grid to a picture: the photo with the map's colours over it.

A map is drawn on the pixels that the model saw; the photo is dark and grey outside of them. The
opacity of the colours grows with the value, so that photo and map are visible together.
"""

from functools import lru_cache

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from vit.data.preprocess import Geometry

PatchMap = Float[np.ndarray, "rows columns"]
# a map whose maximum is lower, in multiples of the average patch, is drawn flat: otherwise
# differences of a few percent would look like an object
FLAT_BELOW = 1.2
_FLAT_STRENGTH = 0.15
# readable with any colour vision, and bright on dark photos; blue is negative, red positive
_COLOURS = {False: "inferno", True: "RdYlBu_r"}
# the darkest colours of the sequential map would hide the photo instead of marking it
_FIRST_COLOUR = 0.35
# exponent of a value's opacity: in proportion (1), middle values couldn't be seen on small pictures
_STRENGTH_EXPONENT = 0.7
_OPACITY = 0.8  # opacity of the highest value
# fraction of its colour that the photo loses below a map, so that it isn't confused with the map's
_FADING = 0.75
_DIMMING = 0.5  # fraction of its brightness that the photo loses where the model didn't see it


def shade(
    values: PatchMap, size: tuple[int, int], *, signed: bool
) -> tuple[Image.Image, Float[np.ndarray, "height width"]]:
    """Return the colour of each pixel of a map that is stretched to `size` (width, height), and its
    strength: 0 (the photo is visible) to 1. Colours of signed maps are symmetric about zero."""
    smooth = np.asarray(
        Image.fromarray(values.astype(np.float32)).resize(size, Image.Resampling.BILINEAR)
    )
    low, high = float(values.min()), float(values.max())
    if signed:
        strength = np.clip(np.abs(smooth) / (max(-low, high) or 1), 0, 1)
        # the middle of each half of the colours: paler ones would whiten the photo, darker ones
        # hide it
        fractions = 0.5 + np.sign(smooth) * (0.25 + 0.15 * strength)
    else:
        strength = np.clip((smooth - low) / (high - low or 1), 0, 1)
        if high <= FLAT_BELOW * float(np.abs(values).mean()):
            strength = np.full_like(smooth, _FLAT_STRENGTH)
        fractions = _FIRST_COLOUR + (1 - _FIRST_COLOUR) * strength
    heat = Image.fromarray((255 * fractions).round().astype(np.uint8))
    # Pillow applies colours faster than numpy, and without the GIL
    heat.putpalette(palette(signed=signed).tobytes())
    return heat.convert("RGB"), strength**_STRENGTH_EXPONENT


@lru_cache
def palette(*, signed: bool) -> UInt8[np.ndarray, "256 3"]:
    """Return the colours of 0 to 255."""
    from matplotlib import colormaps  # takes half a second

    colours = colormaps[_COLOURS[signed]](np.arange(256))[:, :3]
    return (255 * colours).round().astype(np.uint8)


def resize_picture(picture: Image.Image, *, min_side: int, max_side: int) -> Image.Image:
    """Enlarge or reduce a picture so that its longer side is in this range, in pixels."""
    longer = max(picture.size)
    scaling = min(max(longer, min_side), max_side) / longer
    width, height = (max(round(side * scaling), 1) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.LANCZOS)


def blend(photo: Image.Image, values: PatchMap, geometry: Geometry, *, signed: bool) -> Image.Image:
    """Draw the map over the whole upright photo, in any size, which loses most of its colour."""
    scaling = np.divide(photo.size, geometry.original_size)
    left, top, right, bottom = np.round(geometry.box * np.tile(scaling, 2)).astype(int).tolist()
    size = (max(right - left, 1), max(bottom - top, 1))
    grey = photo.convert("L").convert("RGB")
    # the part that the model saw; a crop that is larger than the photo is black around it
    seen = Image.blend(photo, grey, _FADING).crop((left, top, left + size[0], top + size[1]))
    heat, strength = shade(values, size, signed=signed)
    seen.paste(heat, mask=Image.fromarray((strength * _OPACITY * 255).round().astype(np.uint8)))
    drawn = Image.blend(grey, Image.new("RGB", photo.size), _DIMMING)
    drawn.paste(seen, (left, top))
    return drawn
