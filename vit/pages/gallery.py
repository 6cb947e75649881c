"""The gallery: one HTML file to compare attention maps, and to see what each patch attends to."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vit.explanation.render.explained import ExplainedImage, ExplainedMap
from vit.explanation.render.overlay import palette, quantise, relative_to_uniform
from vit.pages.page import encode_picture, render_page
from vit.runtime.files import write_text

MOST_IMAGES = 64
_BYTES_AN_IMAGE = 305_000  # sixteen images and the page itself stay below 5 MB
_PHOTO_CHARACTERS = 42_700  # a JPEG of 32,000 bytes in base64
_PHOTO_SIDE = 400  # pixels


class Gallery:
    """Collects explained images and writes them as one page; after `MOST_IMAGES` it only counts."""

    patch_attention_bytes = 166_000  # of an image, before base64: rollout and every layer of a 14×14 grid

    def __init__(self, class_names: Sequence[str]) -> None:
        self._class_names, self._count = class_names, 0
        self._images: list[dict[str, object]] = []

    def add(self, explained: Sequence[ExplainedImage]) -> None:
        """Take a batch; its photos are kept as small JPEGs, its maps in 8 bits."""
        self._count += len(explained)
        self._images += map(self._describe, explained[: MOST_IMAGES - len(self._images)])

    def write(self, path: Path, *, title: str) -> None:
        context = {
            "title": title,
            "shown": len(self._images),
            "count": self._count,
            "palettes": [_encode(palette(signed=signed)) for signed in (False, True)],
            "images": self._images,
        }
        write_text(path, render_page("gallery.html.jinja", context))

    def _describe(self, explained: ExplainedImage) -> dict[str, object]:
        width, height = explained.geometry.original_size
        left, top, right, bottom = explained.geometry.box
        described: dict[str, object] = {
            "path": explained.item.path.encode("utf-8", "replace").decode(),
            "photo": _encode_photo(explained.open()),
            "size": _shown_size(explained.size),
            "box": [left / width, top / height, right / width, bottom / height],
            "grid": list(explained.grid),
            "predicted": self._class(explained, explained.predicted),
            "maps": [self._describe_map(explained, found) for found in explained.maps if found.values.ndim == 2],
        }
        matrices = [
            vars(each) | {"values": _encode(each.values), "maxima": _encode(each.maxima.astype("<f4"))}
            for each in explained.patch_attention
        ]
        room = _BYTES_AN_IMAGE - len(json.dumps(described))
        for left_out in ("head", "layer"):  # all heads go together, then all layers
            if len(json.dumps(matrices)) > room:
                matrices = [each for each in matrices if each[left_out] is None]
        return described | {"patch_attention": matrices if len(json.dumps(matrices)) <= room else []}

    def _describe_map(self, explained: ExplainedImage, found: ExplainedMap) -> dict[str, object]:
        assert found.scale is not None
        values = relative_to_uniform(found.values) if found.scale.relative else found.values
        return {
            "method": found.method.name,
            "title": found.method.title,
            "target": None if found.target is None else self._class(explained, found.target),
            "signed": found.method.signed,
            "low": found.scale.low,
            "high": found.scale.high,
            "scale": found.scale.label,
            "values": _encode(quantise(values, low=found.scale.low, high=found.scale.high)),
            "prefix_mass": round(found.prefix_mass, 4),
            "entropy": round(found.entropy, 4),
            "sanity_check": None if found.sanity_check is None else found.sanity_check.to_dict(),
        }

    def _class(self, explained: ExplainedImage, index: int) -> dict[str, object]:
        return {"name": self._class_names[index], "percent": round(100 * float(explained.probabilities[index]), 1)}


def _shown_size(size: tuple[int, int]) -> tuple[int, int]:
    scale = _PHOTO_SIDE / max(size)
    return max(round(size[0] * scale), 1), max(round(size[1] * scale), 1)


def _encode_photo(image: Image.Image) -> str:
    """A JPEG of bounded size as a data address; small images are not enlarged."""
    if max(image.size) > _PHOTO_SIDE:
        image = image.resize(_shown_size(image.size), Image.Resampling.LANCZOS)
    encoded = (encode_picture(image, quality=quality) for quality in (88, 75, 60, 40))
    return next((text for text in encoded if len(text) <= _PHOTO_CHARACTERS), encode_picture(image, quality=40))


def _encode(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()
