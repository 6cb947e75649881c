"""The page of an audit: each suspect with its photo and nearest images, to accept or reject by
keyboard; it saves corrections.csv. One HTML file."""

from collections.abc import Iterable
from dataclasses import asdict

from PIL import Image

from vit.data.corrections import COLUMNS
from vit.data.dataset import ImageDataset
from vit.evaluation.audit import Audit
from vit.evaluation.images import printable
from vit.pages.page import encode_picture, render_page, resize_picture

# more would make a page of tens of megabytes; audit.json has all
MAX_SUSPECTS = 200
_MAX_PAIRS = 50
_MAX_ODD = 24


def build_audit_page(audit: Audit, images: ImageDataset) -> str:
    """Build the page: HTML that needs no other file.

    Args:
        audit: of these images.
        images: decoded.
    """
    suspects = audit.label_errors[:MAX_SUSPECTS]
    neighbours = {error.path: audit.neighbours.get(error.path, ())[:4] for error in suspects}
    pairs = audit.near_duplicates[:_MAX_PAIRS]
    outliers = audit.outliers[:_MAX_ODD]
    odd = {name: described.odd[:_MAX_ODD] for name, described in audit.properties.items()}

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
        "photos": _encode(images, (error.path for error in suspects), side=224),
        "thumbnails": _encode(images, small, side=96),
        "columns": COLUMNS,
    }
    return render_page("audit.html.jinja", context)


def _encode(images: ImageDataset, paths: Iterable[str], *, side: int) -> dict[str, str]:
    """Pictures of images by their paths."""
    position = {printable(image_id): index for index, image_id in enumerate(images.ids)}
    assert images.pixels is not None
    pictures = {}
    for path in dict.fromkeys(paths):
        picture = Image.fromarray(images.pixels[position[path]])
        shown = resize_picture(picture, min_side=side, max_side=side)
        pictures[path] = encode_picture(shown)
    return pictures
