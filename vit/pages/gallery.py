"""The gallery: one HTML file to compare attention maps, and to see what each token attends to."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2.utils import htmlsafe_json_dumps
from PIL import Image

from vit.explanation.faithfulness.sanity_checks import VERDICTS
from vit.explanation.render.explained import ExplainedImage, ExplainedMap
from vit.explanation.render.overlay import palette, quantise, relative_to_uniform
from vit.explanation.render.token_details import QuantisedRows, TokenDetails
from vit.pages.page import encode_picture, render_page
from vit.runtime.files import write_text

_BYTES_AN_IMAGE = 305_000  # sixteen images and the page itself stay below 5 MB
_SMALL_PAGE, _LARGE_PAGE = 16 * _BYTES_AN_IMAGE, 64_000_000  # bytes: few images may have more each, many have less
_LEAST_BYTES = 24_000  # of an image, however many there are
_MOST_IMAGES = _LARGE_PAGE // _LEAST_BYTES  # of a page: browsers don't open much larger ones
_PHOTO_BYTES, _PHOTO_SIDE = 42_700, 400  # a JPEG of 32,000 bytes in base64; pixels


class Gallery:
    """Collects explained images and writes them as one page, whose size is planned for `count` of them."""

    def __init__(self, class_names: Sequence[str], *, count: int, best: str | None = None) -> None:
        """`best`: the method that measured best for the model. The page opens on it, or else on the first."""
        count = max(count, 1)
        self._class_names, self._best = class_names, best
        self._bytes = max(_SMALL_PAGE // count, min(_BYTES_AN_IMAGE, _LARGE_PAGE // count), _LEAST_BYTES)  # of an image
        self._photo_bytes = min(2 * self._bytes // 5, _PHOTO_BYTES)
        self.token_bytes = 7 * (self._bytes - self._photo_bytes) // 10  # of an image's `TokenDetails`, before base64
        self._summaries: list[dict[str, Any]] = []
        self._methods: list[str] = []
        self._images: list[str] = []  # JSON, which the page decodes when it shows the image

    def add(self, explained: Sequence[ExplainedImage]) -> None:
        """Take a batch; its photos are kept as small JPEGs, its maps in 8 bits."""
        for of_image in explained:
            described = self._describe(of_image)
            text = htmlsafe_json_dumps(described)
            for left_out in ("head", "layer"):  # all heads go together, then all layers
                if len(text) <= self._bytes or described["tokens"] is None:
                    break
                kept = [each for each in described["tokens"]["attention"] if each[left_out] is None]
                text = htmlsafe_json_dumps(described | {"tokens": described["tokens"] | {"attention": kept}})
            self._images.append(text)
            self._summaries.append(summary := self._summarise(of_image))
            self._methods += [name for name in summary["verdicts"] if name not in self._methods]

    def write(self, path: Path, *, title: str) -> None:
        """Write the page. Of very many images the rest follows on `NAME-2.html` and so on, each linked to all."""
        shared = {
            "palettes": [_encode(palette(signed=signed)) for signed in (False, True)],
            "classes": list(self._class_names),
            "verdicts": VERDICTS,
            "methods": sorted(self._methods, key=lambda name: name != self._best),
            "best": self._best,
        }
        starts = range(0, max(len(self._images), 1), _MOST_IMAGES)
        names = [path.name, *(f"{path.stem}-{number + 2}{path.suffix}" for number in range(len(starts) - 1))]
        links = [(name, start + 1) for name, start in zip(names, starts, strict=True)]
        for name, start in zip(names, starts, strict=True):
            shown = slice(start, start + _MOST_IMAGES)
            context = {"title": title, "page": shared | {"images": self._summaries[shown]}, "links": links}
            context |= {"images": self._images[shown], "name": name}
            write_text(path.with_name(name), render_page("gallery.html.jinja", context))

    def _summarise(self, explained: ExplainedImage) -> dict[str, Any]:
        """What the page finds, sorts and names an image by."""
        maps = [found for found in explained.maps if found.values.ndim == 2]
        verdicts: dict[str, str] = {}
        for found in maps:
            verdict, name = found.sanity_check.verdict if found.sanity_check else VERDICTS[-1], found.method.name
            verdicts[name] = max(verdict, verdicts.get(name, verdict), key=VERDICTS.index)
        tokens = explained.tokens
        return {
            "path": _printable(explained.item.path),
            "predicted": self._class(explained, explained.predicted),
            "verdicts": verdicts,  # by method, of several classes the worst
            "targets": sorted({found.target for found in maps if found.target is not None}),
            "specific": sorted({found.method.name for found in maps if found.method.class_specific}),
            "layers": tokens.layers if tokens else 0,
            "heads": tokens.heads if tokens else 0,
            "lens": tokens is not None and tokens.lens is not None,
        }

    def _describe(self, explained: ExplainedImage) -> dict[str, Any]:
        with explained.open() as image:
            photo = _encode_photo(image, self._photo_bytes)
        width, height = explained.geometry.original_size
        left, top, right, bottom = explained.geometry.box
        return {
            "photo": photo,
            "size": _shown_size(explained.size),
            "box": [left / width, top / height, right / width, bottom / height],
            "input": explained.input_size,
            "grid": explained.grid,
            "maps": [self._describe_map(explained, found) for found in explained.maps if found.values.ndim == 2],
            "tokens": explained.tokens and _describe_tokens(explained.tokens, explained.targets),
        }

    def _describe_map(self, explained: ExplainedImage, found: ExplainedMap) -> dict[str, Any]:
        assert found.scale is not None
        values = relative_to_uniform(found.values) if found.scale.relative else found.values
        return {
            "method": found.method.name,
            "title": found.method.title,
            "target": None if found.target is None else self._class(explained, found.target),
            "signed": found.method.signed,
            "low": found.scale.low,
            "high": found.scale.high,
            "even": float(np.abs(values).mean()),  # what each patch would have if all had the same
            "scale": found.scale.label,
            "values": _encode(quantise(values, low=found.scale.low, high=found.scale.high)),
            "prefix_mass": round(found.prefix_mass, 4),
            "entropy": round(found.entropy, 4),
            "sanity_check": None if found.sanity_check is None else found.sanity_check.to_dict(),
        }

    def _class(self, explained: ExplainedImage, index: int) -> dict[str, Any]:
        percent = round(100 * float(explained.probabilities[index]), 1)
        return {"index": index, "name": self._class_names[index], "percent": percent}


def _describe_tokens(tokens: TokenDetails, targets: Sequence[int]) -> dict[str, Any]:
    lens = tokens.lens
    return {
        "names": tokens.prefix_names,
        "layers": tokens.layers,
        "heads": tokens.heads,
        "attention": [
            {"layer": each.layer, "head": each.head, **_describe_rows(each.rows)} for each in tokens.attention
        ],
        "readout": tokens.readout and _describe_rows(tokens.readout),
        "lens": lens
        and {
            "classes": _encode(lens.classes.astype("<u2")),
            "probabilities": _encode(quantise(lens.probabilities, low=0.0, high=1.0)),
            "targets": targets[: len(lens.of_targets)],
            "of_targets": _encode(quantise(lens.of_targets, low=0.0, high=1.0)),
        },
    }


def _describe_rows(rows: QuantisedRows) -> dict[str, Any]:
    return {"grid": rows.grid, "values": _encode(rows.values), "maxima": _encode(rows.maxima.astype("<f4"))}


def _shown_size(size: tuple[int, int]) -> tuple[int, int]:
    scale = _PHOTO_SIDE / max(size)
    return max(round(size[0] * scale), 1), max(round(size[1] * scale), 1)


def _encode_photo(image: Image.Image, at_most: int) -> str:
    """A JPEG of at most so many characters as a data address; small images are not enlarged."""
    if max(image.size) > _PHOTO_SIDE:
        image = image.resize(_shown_size(image.size), Image.Resampling.LANCZOS)
    encoded = (encode_picture(image, quality=quality) for quality in (88, 75, 60, 40))
    return next((text for text in encoded if len(text) <= at_most), encode_picture(image, quality=40))


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _encode(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()
