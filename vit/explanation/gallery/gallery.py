"""The gallery: one HTML file to compare attention maps and to look at single tokens."""

import base64
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2.utils import htmlsafe_json_dumps
from PIL import Image

from vit.bundle import Bundle
from vit.data.dataset import printable
from vit.explanation.checks.sanity_checks import VERDICTS, count_confirmed
from vit.explanation.methods.sinks import count_sinks
from vit.explanation.records import ClassValues, ImageResult, MapResult
from vit.explanation.render.contact_sheet import BADGES
from vit.explanation.render.outline import find_outlined
from vit.explanation.render.overlay import fit_size
from vit.explanation.render.page import encode_picture, render_page
from vit.explanation.render.scale import palette, quantise
from vit.explanation.render.token_details import LogitLens, QuantisedRows, TokenDetails
from vit.explanation.render.token_features import TokenFeatures
from vit.explanation.training_photos import Neighbour, TrainingPhotos
from vit.prediction.conformal import is_unusual
from vit.runtime.files import write_text

_TEMPLATE = Path(__file__).with_name("gallery.html.jinja")
MAX_IMAGES = 200  # browsers can't open much larger pages
# bytes of `TokenDetails`: of all images on a page, and at least of each image
_PAGE_TOKEN_BYTES = 2_640_000
_MIN_TOKEN_BYTES = 160_000
_PHOTO_SIDE = 400  # pixels
_NUM_NEIGHBOURS = 4
_NEIGHBOUR_SIDE = 64  # pixels
# encoded size of the pictures of an image's neighbours; encoding turns three bytes into four
_NEIGHBOUR_CHARACTERS = 16_000


class Gallery:
    """Collects explained images and writes them as one page.

    Args:
        bundle: The model.
        num_images: Number of images that will be added; with few images there is room for more
            details of tokens.
        smooth: Interpolate between patches. Otherwise each has one colour.
    """

    def __init__(self, bundle: Bundle, *, num_images: int, smooth: bool = True) -> None:
        self._bundle = bundle
        self._smooth = smooth
        self._verdicts: dict[str, list[str]] = {}  # by method, for all images
        self._sink_fractions: dict[str, list[float]] = {}
        self._training_photos = TrainingPhotos(bundle, side=_NEIGHBOUR_SIDE)
        self._token_bytes = max(_PAGE_TOKEN_BYTES // max(num_images, 1), _MIN_TOKEN_BYTES)
        # their pictures take the room of token details
        if not self._training_photos.problem:
            self._token_bytes -= _NEIGHBOUR_CHARACTERS * 3 // 4
        self._methods: list[str] = []
        self._summaries: list[dict[str, Any]] = []
        self._images: list[str] = []  # JSON, decoded when the page shows the image
        self._num_images = 0

    @property
    def token_bytes(self) -> int:
        """Largest size of each image's `TokenDetails` in bytes; 0 when the page is full."""
        return self._token_bytes if len(self._images) < MAX_IMAGES else 0

    def add(self, images: Sequence[ImageResult]) -> None:
        """Add a batch, with photos as small JPEGs and maps in 8 bits. Only the first `MAX_IMAGES`
        images are shown; others count in the summary."""
        self._num_images += len(images)
        for result in (result for image in images for result in image.maps):
            if result.sanity_check is not None:
                verdicts = self._verdicts.setdefault(result.method.name, [])
                verdicts.append(result.sanity_check.verdict)
            self._sink_fractions.setdefault(result.method.name, []).append(result.sink_fraction)
        shown = images[: MAX_IMAGES - len(self._images)]
        pixels = [image.pixels for image in shown if image.pixels is not None]
        nearest = self._training_photos.find(pixels, _NUM_NEIGHBOURS)
        for image, neighbours in zip(shown, nearest, strict=True):
            described = self._describe(image)
            described["neighbours"] = [asdict(row) for row in _fit_pictures(neighbours)]
            # text at once, so that the arrays of the batch can be freed
            self._images.append(htmlsafe_json_dumps(described))
            summary = self._summarise(image)
            self._summaries.append(summary)
            self._methods += [name for name in summary["verdicts"] if name not in self._methods]

    def write(self, path: Path, *, title: str) -> None:
        """Write the page."""
        # values for all images; each image is a separate JSON text, decoded when it is shown
        page = {
            "palettes": [_encode(palette(signed=signed)) for signed in (False, True)],
            "classes": list(self._bundle.class_names),
            "noun": "label" if self._bundle.is_multilabel else "class",
            "verdicts": VERDICTS,
            "badges": BADGES,
            "methods": self._methods,
            "smooth": self._smooth,
            "summary": {name: self._count(name) for name in self._methods},
            "images": self._summaries,
        }
        context = {
            "title": title,
            "page": page,
            "images": self._images,
            "num_images": self._num_images,
        }
        write_text(path, render_page(_TEMPLATE, context))

    def _count(self, method: str) -> list[str]:
        """Return lines about all maps of a method."""
        verdicts = self._verdicts.get(method, ())
        return count_confirmed({method: verdicts}) + count_sinks(
            {method: self._sink_fractions[method]}
        )

    def _summarise(self, image: ImageResult) -> dict[str, Any]:
        """Return the values by which the page finds, sorts and names an image."""
        verdicts: dict[str, str] = {}  # by method; for several classes the worst
        for result in image.maps:
            name = result.method.name
            verdict = VERDICTS[-1]
            if result.sanity_check is not None:
                verdict = result.sanity_check.verdict
            verdicts[name] = max(verdict, verdicts.get(name, verdict), key=VERDICTS.index)
        tokens = image.tokens
        return {
            "title": printable(image.item.title),
            "predicted": _use_percent(image.describe_predicted(self._bundle.class_names)),
            # the p-value of an unusual image
            "unusual": image.p_value if is_unusual(image.p_value) else None,
            "unsure": image.note == "unsure",
            "verdicts": verdicts,
            "targets": sorted(
                {result.target for result in image.maps if result.target is not None}
            ),
            "specific": sorted(
                {result.method.name for result in image.maps if result.method.class_specific}
            ),
            "layers": tokens.num_layers if tokens else 0,
            "heads": tokens.num_heads if tokens else 0,
            "lens": tokens is not None and tokens.lens is not None,
            "features": tokens is not None and tokens.features is not None,
        }

    def _describe(self, image: ImageResult) -> dict[str, Any]:
        # the box as fractions, because the photo is reduced
        width, height = image.geometry.original_size
        left, top, right, bottom = image.geometry.box
        photo = image.read_image()
        # small ones are not enlarged
        if max(photo.size) > _PHOTO_SIDE:
            photo = photo.resize(fit_size(photo.size, _PHOTO_SIDE), Image.Resampling.LANCZOS)
        return {
            "photo": encode_picture(photo),
            "size": fit_size(image.geometry.original_size, _PHOTO_SIDE),
            "box": [left / width, top / height, right / width, bottom / height],
            "input": self._bundle.preprocess.image_size[::-1],
            "grid": image.grid,
            "maps": [self._describe_map(image, result) for result in image.maps],
            "tokens": image.tokens and _describe_tokens(image.tokens, image.targets),
        }

    def _describe_map(self, image: ImageResult, result: MapResult) -> dict[str, Any]:
        scale = result.scale
        assert scale is not None
        values = result.shown_values
        low, high = float(values.min()), float(values.max())
        target = image.describe_target(result, self._bundle.class_names)
        return {
            "method": result.method.name,
            "title": result.method.title,
            "caption": result.describe(),
            "target": target and _use_percent(target),
            "signed": result.method.signed,
            # ends of the colours; values are stored in their own range, in multiples of the average
            # patch, so that maps of two classes can be compared
            "ends": [scale.low, scale.high],
            "flat": scale.is_flat,
            "outlined": np.flatnonzero(find_outlined(values, scale)).tolist(),
            "low": low,
            "high": high,
            "even": float(np.abs(result.values).mean()),
            "scale": scale.label,
            "values": _encode(quantise(values, low=low, high=high)),
            "prefix_mass": round(result.prefix_mass, 4),
            "entropy": round(result.entropy, 4),
            "sanity_check": result.sanity_check and asdict(result.sanity_check),
            "sinks": result.describe_sinks(),
        }


def _use_percent(described: ClassValues) -> dict[str, Any]:
    """Return a class, and the labels of a prediction, with the probability in percent."""
    probability = described["probability"]
    percent = None if probability is None else round(100 * probability, 1)
    values = {"index": described["index"], "name": described["name"], "percent": percent}
    if "labels" in described:
        values["labels"] = [_use_percent(label) for label in described["labels"]]
    return values


def _fit_pictures(neighbours: Sequence[Neighbour]) -> list[Neighbour]:
    """Return the neighbours without the pictures for which the page has no room."""
    fitting = []
    room = _NEIGHBOUR_CHARACTERS
    for neighbour in neighbours:
        room -= len(neighbour.picture or "")
        fitting.append(neighbour if room >= 0 else replace(neighbour, picture=None))
    return fitting


def _describe_tokens(tokens: TokenDetails, targets: Sequence[int]) -> dict[str, Any]:
    attention = [
        {"layer": details.layer, "head": details.head} | _describe_rows(details.rows)
        for details in tokens.attention
    ]
    effects = None
    if tokens.head_effects is not None:
        effects = [[float(f"{x:.3g}") for x in row] for row in tokens.head_effects.tolist()]
    return {
        "names": tokens.prefix_names,
        "layers": tokens.num_layers,
        "heads": tokens.num_heads,
        "attention": attention,
        "pooled": tokens.pooled and _describe_rows(tokens.pooled),
        "lens": tokens.lens and _describe_lens(tokens.lens, targets),
        "features": tokens.features and _describe_features(tokens.features),
        "effects": effects,
    }


def _describe_rows(rows: QuantisedRows) -> dict[str, str]:
    return {
        "values": _encode(rows.values.numpy()),
        "maxima": _encode(rows.maxima.numpy().astype("<f4")),
    }


def _describe_lens(lens: LogitLens, targets: Sequence[int]) -> dict[str, Any]:
    probabilities = lens.target_probabilities.numpy()
    return {
        "classes": _encode(lens.classes.numpy().astype("<u2")),
        "probabilities": _encode(quantise(lens.probabilities.numpy(), low=0.0, high=1.0)),
        "targets": targets[: len(probabilities)],
        "target_probabilities": _encode(quantise(probabilities, low=0.0, high=1.0)),
    }


def _describe_features(features: TokenFeatures) -> dict[str, Any]:
    coordinates, scales = features.coordinates, features.scales
    return {
        "colours": _encode(features.colours.numpy()),
        "norms": _encode(features.norms.numpy()),
        "max_norms": features.max_norms.tolist(),
        # None if the page has no room for them
        "coordinates": None if coordinates is None else _encode(coordinates.numpy()),
        "scales": None if scales is None else scales.tolist(),
    }


def _encode(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()
