"""Reads photos as the model was trained: read_rgb("photo.jpg")."""

import os

from PIL import Image, ImageOps

from vit.data.depth import guess_range, is_deep, read_values, refuse_dicom, scale_values


def read_rgb(image, value_range=None):
    """Read a file, or convert an image of PIL in any mode, to upright RGB: transparency becomes
    white, and of more than 8 bits the model's range becomes 0 to 255."""
    if isinstance(image, str | os.PathLike):
        refuse_dicom(image)
        # only these: some formats of Pillow start programs
        formats = ["AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"]
        with Image.open(image, formats=formats) as opened:
            if opened.width * opened.height > 100_000_000 or max(opened.size) > 65_535:
                raise ValueError(f"{image} has more than 100 million pixels or 65,535 a side")
            image = _scale_deep(opened, value_range)
    else:
        image = _scale_deep(image, value_range)
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _scale_deep(image, value_range):
    if not is_deep(image):
        return ImageOps.exif_transpose(image)
    values, limits, is_inverted = read_values(image)
    low, high = value_range or guess_range(values, limits)
    return Image.fromarray(scale_values(values, low, high, is_inverted=is_inverted))
