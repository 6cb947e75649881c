"""The page of an audit: one HTML file that shows each suspect with its photo and nearest images.

Suspects are accepted or rejected by keyboard, and the page saves corrections.csv.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vit.analysis.audit.suspects import Audit, LabelError
from vit.bundle import Bundle
from vit.data.corrections import COLUMNS
from vit.data.dataset import ImageDataset, printable
from vit.explanation.capture.reader import read_bundle
from vit.explanation.methods.maps import compute_maps
from vit.explanation.render.page import encode_photo, encode_relative_map, render_page
from vit.explanation.targets import CLASS, build_target
from vit.prediction.predictor import Pixels

_TEMPLATE = Path(__file__).with_name("audit.html.jinja")
# More would make a page of tens of megabytes; audit.json has all.
_MAX_SUSPECTS = 200
_MAX_PAIRS = 50
_MAX_ODD = 24
_MAX_MAPS = 24
# pixels
_SIDE = 224
_THUMBNAIL_SIDE = 96


def build_audit_page(audit: Audit, images: ImageDataset, bundle: Bundle) -> str:
    """Build the page.

    Args:
        audit: The result of the audit.
        images: The images, decoded.
        bundle: Model that gave the features; it draws maps of the first suspects.
    """
    suspects = audit.label_errors[:_MAX_SUSPECTS]
    neighbours = {error.path: audit.neighbours[error.path][:4] for error in suspects}
    pairs = audit.near_duplicates[:_MAX_PAIRS]
    outliers = audit.outliers[:_MAX_ODD]
    odd = {name: described.odd[:_MAX_ODD] for name, described in audit.properties.items()}

    assert images.pixels is not None
    photos = {
        printable(image_id): pixels
        for image_id, pixels in zip(images.ids, images.pixels, strict=True)
    }
    small = [path for near in neighbours.values() for path, _ in near]
    small += [path for pair in pairs for path in pair.paths]
    small += [image.path for image in outliers]
    small += [image.path for rows in odd.values() for image in rows]
    context = {
        "audit": audit,
        "suspects": [asdict(error) for error in suspects],
        "neighbours": neighbours,
        "pairs": pairs,
        "outliers": outliers,
        "odd": odd,
        "photos": _encode(photos, (error.path for error in suspects), side=_SIDE),
        "maps": _draw_maps(bundle, photos, suspects[:_MAX_MAPS]),
        "thumbnails": _encode(photos, small, side=_THUMBNAIL_SIDE),
        "columns": COLUMNS,
    }
    return render_page(_TEMPLATE, context)


def _encode(photos: Mapping[str, Pixels], paths: Iterable[str], *, side: int) -> dict[str, str]:
    """Return pictures of images, by path."""
    return {
        path: encode_photo(Image.fromarray(photos[path]), side=side)
        for path in dict.fromkeys(paths)
    }


def _draw_maps(
    bundle: Bundle, photos: Mapping[str, Pixels], suspects: Sequence[LabelError]
) -> dict[str, tuple[str, str]]:
    """Return a map and its caption, by path; none if the model's attention can't be read."""
    maps: dict[str, tuple[str, str]] = {}
    names = bundle.class_names
    with suppress(ValueError):
        for error in suspects:
            seen = bundle.preprocess.crop(photos[error.path])
            batch = torch.from_numpy(np.ascontiguousarray(seen[None])).to(bundle.device)
            # A model that doesn't know the classes can't say why one of them is preferred.
            method = "rollout"
            caption = "attention rollout"
            target = CLASS
            if {error.given, error.suggested} <= set(names):
                method = "libra-fullgrad"
                caption = f"evidence for {error.suggested} (red) and for {error.given} (blue)"
                target = build_target(f"{error.suggested} - {error.given}", names)
            _, _, (explained,) = compute_maps(
                read_bundle(bundle),
                bundle.preprocess.normalize(batch),
                methods=[method],
                target=target,
                # Only the first map checks that the model's attention is read correctly.
                verify=not maps,
            )
            values = explained.values[0, 0].cpu().numpy()
            signed = bool((values < 0).any())
            picture = encode_relative_map(Image.fromarray(seen), values, signed=signed, side=_SIDE)
            maps[error.path] = (picture, caption)
    return maps
