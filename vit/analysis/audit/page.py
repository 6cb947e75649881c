"""The page of an audit: one HTML file that shows each suspect with its photo and nearest images.

Suspects are accepted or rejected by keyboard, and the page saves corrections.csv.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from PIL import Image

from vit.analysis.audit.suspects import Audit
from vit.data.corrections import COLUMNS, SEPARATOR
from vit.data.dataset import ImageDataset, printable
from vit.explanation.render.page import encode_photo, name_model, render_page
from vit.prediction.predictor import Pixels
from vit.runtime.numbers import format_percent

_TEMPLATE = Path(__file__).with_name("audit.html.jinja")
# More would make a page of tens of megabytes; audit.json has all.
_MAX_SUSPECTS = 200
_MAX_PAIRS = 50
_MAX_ODD = 24
# pixels
_SIDE = 288
_THUMBNAIL_SIDE = 112


def build_audit_page(audit: Audit, images: ImageDataset) -> str:
    """Build the page.

    Args:
        audit: The result of the audit.
        images: The images, decoded.
    """
    suspects = audit.label_errors[:_MAX_SUSPECTS]
    pairs = audit.near_duplicates[:_MAX_PAIRS]
    outliers = audit.outliers[:_MAX_ODD]
    odd = {name: described.odd[:_MAX_ODD] for name, described in audit.properties.items()}

    assert images.pixels is not None
    photos = {
        printable(image_id): pixels
        for image_id, pixels in zip(images.ids, images.pixels, strict=True)
    }
    small = [
        path
        for error in suspects
        for near in audit.neighbours[error.key].values()
        for path, _ in near
    ]
    small += [path for pair in pairs for path in pair.paths]
    small += [image.path for image in outliers]
    small += [image.path for rows in odd.values() for image in rows]
    context = {
        "audit": audit,
        "model": name_model(audit.model),
        "top1": format_percent(audit.top1 if audit.map is None else audit.map, audit.num_images),
        "suspects": [{**asdict(error), "key": error.key} for error in suspects],
        "pairs": pairs,
        "outliers": outliers,
        "odd": odd,
        "photos": _encode(photos, (error.path for error in suspects), side=_SIDE),
        "thumbnails": _encode(photos, small, side=_THUMBNAIL_SIDE),
        "columns": COLUMNS,
        "separator": SEPARATOR,
    }
    return render_page(_TEMPLATE, context)


def _encode(photos: Mapping[str, Pixels], paths: Iterable[str], *, side: int) -> dict[str, str]:
    """Return pictures of images, by path."""
    return {
        path: encode_photo(Image.fromarray(photos[path]), side=side)
        for path in dict.fromkeys(paths)
    }
