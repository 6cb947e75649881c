"""The gallery: one HTML file with photos, their maps, and what each layer, head and patch attends to.

The browser draws it. A map is a picture of one pixel for each patch, which CSS stretches over the
photo. Layers and heads, and the rows of the rollout, are tiles of one picture each.
"""

import io
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from vit.bundle import Bundle
from vit.data.dataset import printable
from vit.explanation.checks.sanity_checks import VERDICTS, count_confirmed
from vit.explanation.records import ImageResult, MapResult
from vit.explanation.render.outline import trace_outline
from vit.explanation.render.overlay import fit_size, shade
from vit.explanation.render.page import BADGES, encode_picture, render_page
from vit.explanation.render.scale import palette
from vit.runtime.files import write_text

_TEMPLATE = Path(__file__).with_name("gallery.html.jinja")
MAX_IMAGES = 200  # browsers can't open much larger pages
_PHOTO_SIDE = 400  # pixels
_OPACITY = 220  # opacity of the strongest attention, of 255


class Gallery:
    """Collects explained images and writes them as one page.

    Args:
        bundle: The model.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._images: list[dict[str, Any]] = []
        self._num_images = 0
        self._methods: dict[str, str] = {}  # titles by name
        self._classes: dict[int, str] = {}
        self._verdicts: dict[str, list[str]] = {}  # of all images, by method

    @property
    def is_full(self) -> bool:
        """True if the page shows no more images."""
        return len(self._images) >= MAX_IMAGES

    def add(self, images: Sequence[ImageResult]) -> None:
        """Add a batch. Only the first `MAX_IMAGES` images are shown; others count in the summary."""
        self._num_images += len(images)
        for result in (result for image in images for result in image.maps):
            self._methods[result.method.name] = result.method.title
            if result.target is not None and result.target_name is not None:
                self._classes[result.target] = result.target_name
            if result.sanity_check is not None:
                verdicts = self._verdicts.setdefault(result.method.name, [])
                verdicts.append(result.sanity_check.verdict)
        self._images += map(self._describe, images[: MAX_IMAGES - len(self._images)])

    def write(self, path: Path, *, title: str) -> None:
        """Write the page."""
        context = {
            "title": title,
            "images": self._images,
            "num_images": self._num_images,
            "methods": self._methods,
            "classes": dict(sorted(self._classes.items())),
            "noun": "label" if self._bundle.is_multilabel else "class",
            "verdicts": VERDICTS,
            "summary": count_confirmed(self._verdicts),
        }
        write_text(path, render_page(_TEMPLATE, context))

    def _describe(self, image: ImageResult) -> dict[str, Any]:
        # the box in percent, because the photo is reduced
        width, height = image.geometry.original_size
        left, top, right, bottom = image.geometry.box
        photo = image.read_image()
        if max(photo.size) > _PHOTO_SIDE:  # small ones are not enlarged
            photo = photo.resize(fit_size(photo.size, _PHOTO_SIDE), Image.Resampling.LANCZOS)
        predicted = image.describe_predicted(self._bundle.class_names)
        attention = image.attention or {}
        return {
            "title": printable(image.item.title),
            "photo": encode_picture(photo),
            "size": (width, height),
            "box": [
                100 * left / width,
                100 * top / height,
                100 * (right - left) / width,
                100 * (bottom - top) / height,
            ],
            "grid": image.grid,
            "predicted": printable(str(predicted["name"])),
            "confidence": predicted["probability"],
            "said": image.describe_prediction(self._bundle.class_names),
            "maps": [_describe_map(image, result) for result in image.maps],
            "heads": attention["heads"].shape[:2] if "heads" in attention else (0, 0),
            "pictures": {name: _encode_tiles(tiles) for name, tiles in attention.items()},
        }


def _describe_map(image: ImageResult, result: MapResult) -> dict[str, Any]:
    assert result.scale is not None
    # colours as on the overlays, with the opacity in the fourth channel
    heat, strength = shade(result.shown_values, result.scale)
    heat.putalpha(Image.fromarray((255 * strength).round().astype(np.uint8)))
    # lines in patches from the upper left corner of the model's input
    rows, columns = image.grid
    left, top, right, bottom = image.geometry.box
    across, down = columns / (right - left), rows / (bottom - top)
    lines = [
        f"M{(x - left) * across:g} {(y - top) * down:g}L{(to_x - left) * across:g} {(to_y - top) * down:g}"
        for (x, y), (to_x, to_y) in trace_outline(result.shown_values, image.geometry, result.scale)
    ]
    verdict = result.sanity_check.verdict if result.sanity_check else VERDICTS[-1]
    badge, colour = BADGES[verdict]
    return {
        "method": result.method.name,
        "target": "" if result.target is None else result.target,
        "caption": result.describe(),
        "picture": encode_picture(heat, "PNG"),
        "outline": "".join(lines),
        "verdict": verdict,
        "badge": badge,
        "colour": colour,
        "reason": str(result.sanity_check or ""),
    }


def _encode_tiles(tiles: Float[np.ndarray, "down across rows columns"]) -> str:
    """Encode maps as tiles of one picture; the colours of each go from 0 to its largest value."""
    largest = np.maximum(tiles.max(axis=(2, 3), keepdims=True), 1e-30)
    cells: UInt8[np.ndarray, "down across rows columns"] = np.round(255 * tiles / largest).astype(
        np.uint8
    )
    down, across, rows, columns = tiles.shape
    picture = Image.fromarray(cells.swapaxes(1, 2).reshape(down * rows, across * columns))
    picture.putpalette(palette(signed=False).tobytes())
    file = io.BytesIO()
    # low values show the photo
    ramp = np.linspace(0, _OPACITY, 256).astype(np.uint8).tobytes()
    picture.save(file, "PNG", transparency=ramp, optimize=True)
    return "data:image/png;base64," + b64encode(file.getvalue()).decode()


Attention = Mapping[str, Float[np.ndarray, "down across rows columns"]]
