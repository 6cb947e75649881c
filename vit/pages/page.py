"""Self-contained pages: one HTML file that opens from disk with the network off, and the pictures
in it."""

import base64
import io
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from PIL import Image

from vit.bundle import MODEL_FILE


def render_page(template: str, context: Mapping[str, object]) -> str:
    """Fill a template of this folder.

    In HTML every value is escaped; data for scripts goes through Jinja's `tojson`, which escapes
    `<` as well.

    Args:
        template: the template's file name.
        context: a value for each name in it.

    Raises:
        jinja2.UndefinedError: for a name that is missing from `context`.
    """
    environment = Environment(
        loader=PackageLoader("vit", "pages"),
        autoescape=select_autoescape(("html.jinja",)),
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template(template).render(context)


def name_model(source: str) -> str:
    """What pages call a model: the name of its run directory, or of its file."""
    path = Path(source).absolute()
    return path.parent.name if path.name == MODEL_FILE else path.name


def resize_picture(
    picture: Image.Image, *, min_side: int = 160, max_side: int = 256
) -> Image.Image:
    """The picture enlarged or reduced so that its longer side lies within these, in pixels."""
    longer = max(picture.size)
    scale = min(max(longer, min_side), max_side) / longer
    width, height = (max(round(side * scale), 1) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.LANCZOS)


def encode_picture(picture: Image.Image, kind: str = "JPEG") -> str:
    """A picture as a data address."""
    file = io.BytesIO()
    picture.save(file, format=kind, quality=80, optimize=True)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(file.getvalue()).decode()
