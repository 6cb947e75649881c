"""Images of every mode, format and orientation that Pillow writes and vit reads."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import PIL
from PIL import Image
from sklearn.datasets import load_sample_images

_SUFFIXES = ("png", "jpg", "gif", "bmp", "tif", "webp", "ppm", "avif")
_MODES = (
    "1", "L", "LA", "La", "P", "P tRNS", "PA", "RGB", "RGB tRNS", "L tRNS", "RGBA", "RGBa", "CMYK", "YCbCr", "HSV",
    "LAB", "I;16", "I;16B", "I", "F",
)  # fmt: skip


def write_odd_images(folder: Path) -> list[Path]:
    """Cut-outs of a photograph, of odd sizes."""
    photo = Image.fromarray(load_sample_images().images[0])
    paths = []
    for row, mode in enumerate(_MODES):
        for column, suffix in enumerate(_SUFFIXES):
            if (mode, suffix) == ("YCbCr", "tif") and int(PIL.__version__.split(".")[0]) < 13:
                continue  # read as RGB of other bands, which is refused
            box = (10 * row, 9 * column, 10 * row + 40 + row, 9 * column + 60 - 3 * column)
            path = folder / f"{len(paths):03d}-{mode.replace(' ', '-').replace(';', '')}.{suffix}"
            # no format takes all modes
            with suppress(OSError, ValueError, KeyError, TypeError):
                image, options = _convert(photo.crop(box), mode)
                image.save(path, **options)
                paths.append(path)
    for orientation in range(1, 9):
        for suffix in ("jpg", "png", "webp", "tif", "avif"):
            exif = Image.Exif()
            exif[0x0112] = orientation
            path = folder / f"{len(paths):03d}-exif-{orientation}.{suffix}"
            photo.crop((0, 0, 50, 40 + orientation)).save(path, exif=exif)
            paths.append(path)
    # a file that failed may be there in part
    return [path for path in paths if path.stat().st_size]


def _convert(image: Image.Image, mode: str) -> tuple[Image.Image, dict[str, int]]:
    grey = image.convert("L")
    plain, _, transparency = mode.partition(" ")
    options = {}
    if transparency:
        options["transparency"] = {"P": 3, "L": 100, "RGB": (100, 100, 100)}[plain]
    if mode.startswith("I;16"):
        # 16 bits, and 12
        kind, scale = ("<u2", 255) if mode == "I;16" else (">u2", 16)
        return Image.fromarray((np.asarray(grey).astype(np.uint16) * scale).astype(kind)), {}
    if mode == "I":
        return Image.fromarray(np.asarray(grey).astype(np.int32) * 300 - 2000), {}
    if mode in ("RGBA", "LA", "RGBa", "La"):
        base = image.convert("RGBA" if "RGB" in mode else "LA")
        base.putalpha(grey)
        return base.convert(mode), {}
    if plain == "P":
        return image.quantize(16), options
    return image.convert(plain), options
