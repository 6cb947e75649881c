"""Forty pictures of all kinds that people have: formats, modes, turned, odd sizes."""

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

from tests.data.test_colour import SWAPPED

# name → mode of Pillow
_MODES = {
    "cmyk.jpg": "CMYK",
    "grey.jpg": "L",
    "one-bit.png": "1",
    "palette.png": "P",
    "palette.gif": "P",
    "cmyk.tif": "CMYK",
    "lab.tif": "LAB",
    "colour.bmp": "RGB",
    "colour.ppm": "RGB",
    "colour.webp": "RGB",
    "colour.avif": "RGB",
    "grey.tif": "L",
}
# width and height
_SIZES = ((1, 1), (1, 9), (300, 1), (3, 400), (33, 47), (640, 37), (1350, 825))


def write_odd_images(folder: Path) -> list[Path]:
    """Write cut-outs of a photograph, and return their paths."""
    photo = Image.fromarray(load_sample_images().images[0])
    grey = photo.convert("L")
    for name, mode in _MODES.items():
        photo.crop((20, 30, 131, 107)).convert(mode).save(folder / name)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        for suffix in ("jpg",) if orientation < 7 else ("jpg", "png", "webp"):
            photo.crop((0, 0, 90, 60)).save(folder / f"turned-{orientation}.{suffix}", exif=exif)
    for width, height in _SIZES:
        size = f"{width}x{height}"
        photo.resize((width, height)).save(folder / f"{size}.png")

    transparent = photo.crop((100, 100, 200, 180)).convert("RGBA")
    transparent.putalpha(grey.crop((0, 0, 100, 80)))
    transparent.save(folder / "alpha.png")
    transparent.save(folder / "alpha.webp")
    transparent.convert("LA").save(folder / "grey-alpha.png")
    photo.quantize(16).save(folder / "palette-transparent.png", transparency=3)
    photo.save(folder / "colour-transparent.png", transparency=photo.getpixel((5, 5)))
    grey.save(folder / "grey-transparent.png", transparency=100)
    photo.save(folder / "film.gif", save_all=True, append_images=[photo.rotate(180)])

    for mode in ("RGB", "RGBA", "P", "L"):
        photo.convert(mode).save(folder / f"profile-{mode}.png", icc_profile=SWAPPED)
    values = np.asarray(grey).astype(np.uint16)
    Image.fromarray(values * 257).save(folder / "16-bit.png")
    Image.fromarray(values * 16).save(folder / "12-bit.png")
    Image.fromarray((values * 257).astype(">u2")).save(folder / "16-bit.tif")
    return sorted(folder.iterdir())
