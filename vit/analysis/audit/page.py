"""The page of an audit: one HTML file that shows each suspect with its photo and nearest images,
and the most unusual images.

Suspects are accepted or rejected by keyboard, and the page saves corrections.csv.
"""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from PIL import Image

from vit.analysis.audit.suspects import Audit
from vit.data.corrections import COLUMNS
from vit.data.dataset import ImageDataset, printable
from vit.explanation.render.page import encode_photo, name_model, render_page
from vit.runtime.numbers import format_percent

_TEMPLATE = Path(__file__).with_name("audit.html.jinja")
# More would make a page of tens of megabytes; audit.json has all.
_MAX_SUSPECTS = 200
_MAX_PAIRS = 50
# pixels
_SIDE = 288
_THUMBNAIL_SIDE = 112


def build_audit_page(audit: Audit, images: ImageDataset) -> str:
    """Build the page. Images that are not decoded are read if it shows them."""
    suspects = audit.label_errors[:_MAX_SUSPECTS]
    pairs = audit.near_duplicates[:_MAX_PAIRS]
    places = {printable(image_id): index for index, image_id in enumerate(images.ids)}
    unusual = audit.unusual[:_MAX_PAIRS]
    small = {path for pair in pairs for path in pair.paths} | {path for path, *_ in unusual}
    for error in suspects:
        for near in audit.neighbours[error.path].values():
            small |= {path for path, _ in near}

    def encode(paths: Iterable[str], side: int) -> dict[str, str]:
        return {path: encode_photo(_read(images, places[path]), side=side) for path in paths}

    context = {
        "audit": audit,
        "model": name_model(audit.model),
        "top1": format_percent(audit.top1, audit.num_images),
        "suspects": [asdict(error) for error in suspects],
        "unusual": unusual,
        "pairs": pairs,
        "photos": encode((error.path for error in suspects), _SIDE),
        "thumbnails": encode(small, _THUMBNAIL_SIDE),
        "columns": COLUMNS,
    }
    return render_page(_TEMPLATE, context)


def _read(images: ImageDataset, index: int) -> Image.Image:
    if images.pixels is None:
        return images.image(index)
    return Image.fromarray(images.pixels[index])
