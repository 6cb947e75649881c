"""Pictures inside a page: small, and encoded as data addresses."""

import base64
import io

import numpy as np
from PIL import Image

_THUMBNAIL = 64  # pixels
_SIDES = (160, 256)  # pixels: other pictures are brought between these


def encode_thumbnail(pixels: np.ndarray) -> str:
    """uint8 pixels [H, W, 3] as a WebP image of at most 64 pixels."""
    picture = Image.fromarray(pixels)
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
    return encode_picture(picture, "WEBP")


def resize_picture(picture: Image.Image) -> Image.Image:
    """The picture enlarged or reduced so that its longer side has 160 to 256 pixels."""
    longer = max(picture.size)
    scale = min(max(longer, _SIDES[0]), _SIDES[1]) / longer
    width, height = (max(round(side * scale), 1) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.LANCZOS)


def encode_picture(picture: Image.Image, kind: str = "JPEG", *, quality: int = 80) -> str:
    """A picture as a data address."""
    file = io.BytesIO()
    picture.save(file, format=kind, quality=quality, optimize=True)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(file.getvalue()).decode()
