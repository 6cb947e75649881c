"""Pages: one HTML file with its pictures, which opens from disk with the network off."""

import base64
import io
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from PIL import Image

from vit.explanation.render.overlay import resize_picture
from vit.model.find_file import MODEL_FILE

# text of each verdict's badge, and its colour, which is dark enough for white text
BADGES = {
    "confirmed": ("✓ map confirmed", "#15703a"),
    "partly confirmed": ("~ map partly confirmed", "#8a5a00"),
    "not confirmed": ("✗ map not confirmed", "#a02020"),
    "not tested": ("– map not tested", "#555555"),
}


def render_page(template: Path, context: Mapping[str, object]) -> str:
    """Fill a template, which can extend and include the files of its own folder and of this one.
    Every value is escaped; data for scripts goes through Jinja's `tojson`."""
    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=select_autoescape(("html.jinja",)),
        # a misspelt name is an error instead of an empty text
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template(template.name).render(context)


def name_model(source: str) -> str:
    """Return a model's name on pages: that of its run directory or file."""
    path = Path(source).absolute()
    # all runs have the same file name, so the folder tells them apart
    return path.parent.name if path.name == MODEL_FILE else path.name


def encode_photo(photo: Image.Image, *, side: int) -> str:
    """Encode a photo as a data address; its longer side gets `side` pixels."""
    return encode_picture(resize_picture(photo, min_side=side, max_side=side))


def encode_picture(picture: Image.Image, kind: str = "JPEG") -> str:
    """Encode a picture as a data address."""
    file = io.BytesIO()
    picture.save(file, format=kind, quality=80, optimize=True)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(file.getvalue()).decode()
