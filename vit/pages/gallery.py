"""The gallery: one HTML file to compare attention maps, and to see what each patch attends to."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vit.explanation.render.explained import ExplainedImage, ExplainedMap
from vit.explanation.render.overlay import palette, quantise, relative_to_uniform
from vit.explanation.render.patch_attention import PatchAttention
from vit.pages.page import render_page
from vit.pages.pictures import encode_picture
from vit.runtime.files import write_text

MOST_IMAGES = 64
_BYTES_AN_IMAGE = 305_000  # sixteen images and the page itself stay below 5 MB
_PATCH_ATTENTION_BYTES = 166_000  # of them, before base64: rollout and every layer of a 14×14 grid
_PHOTO_CHARACTERS = 42_700  # a JPEG of 32,000 bytes in base64
_PHOTO_SIDE = 400  # pixels


class Gallery:
    """Collects explained images and writes them as one page; after `MOST_IMAGES` it only counts."""

    patch_attention_bytes = _PATCH_ATTENTION_BYTES

    def __init__(self, class_names: Sequence[str]) -> None:
        self._class_names = class_names
        self._images: list[dict[str, object]] = []
        self._count = 0

    def add(self, explained: Sequence[ExplainedImage]) -> None:
        """Take a batch; its photos are kept as small JPEGs, its maps in 8 bits."""
        self._count += len(explained)
        for of_image in explained[: MOST_IMAGES - len(self._images)]:
            self._images.append(self._describe(of_image))

    def write(self, path: Path, *, title: str) -> None:
        """Write the page to `path`."""
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
        matrices = [_describe_attention(each) for each in explained.patch_attention]
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


def _describe_attention(attention: PatchAttention) -> dict[str, object]:
    return {
        "layer": attention.layer,
        "head": attention.head,
        "grid": list(attention.grid),
        "values": _encode(attention.values),
        "maxima": _encode(attention.maxima.astype("<f4")),
    }


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
