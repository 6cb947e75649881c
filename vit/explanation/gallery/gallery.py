"""The gallery: one HTML file with photos, their maps, and what layers, heads and patches attend to.

A map is a picture of one pixel for each patch, which the browser stretches over the photo. Layers
and heads, and the rows of the rollout, are tiles of one picture each.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image

from vit.bundle import Bundle
from vit.explanation.checks.sanity_checks import count_confirmed
from vit.explanation.records import ImageResult, MapResult
from vit.explanation.render.overlay import palette, resize_picture, shade
from vit.explanation.render.page import BADGES, encode_picture, name_model, render_page
from vit.runtime.files import write_atomically

MAX_IMAGES = 200  # browsers can't open much larger pages
_PHOTO_SIDE = 400  # pixels
_OPACITY = 220  # opacity of the strongest attention, of 255


def write_gallery(
    path: Path, bundle: Bundle, cards: Sequence[Mapping[str, Any]], *, num_images: int
) -> None:
    """Write the page of the first of `num_images` images, see `describe_card`."""
    maps = [each for card in cards for each in card["maps"]]
    targets = [each["target"] for each in maps if each["target"]]
    classes = {each["index"]: each["name"] for each in targets if each["index"] is not None}
    context = {
        "title": f"Attention maps of {name_model(bundle.name)}",
        "images": cards,
        "num_images": num_images,
        "methods": dict.fromkeys(each["method"] for each in maps),
        "classes": dict(sorted(classes.items())),
        "noun": "label" if bundle.is_multilabel else "class",
        "badges": BADGES,
        "summary": count_confirmed(cards),
    }
    write_atomically(path, render_page(Path(__file__).with_name("gallery.html.jinja"), context))


def describe_card(image: ImageResult) -> dict[str, Any]:
    """Describe an image for the page: as the manifest has it, with its pictures."""
    assert image.photo is not None
    # small ones are not enlarged
    photo = resize_picture(image.photo, min_side=1, max_side=_PHOTO_SIDE)
    attention = image.attention or {}
    return image.to_dict() | {
        "said": image.describe_prediction(),
        "photo": encode_picture(photo),
        "grid": image.maps[0].values.shape,
        "map_pictures": [_draw_map(result) for result in image.maps],
        "pictures": {name: _encode_tiles(tiles) for name, tiles in attention.items()},
    }


def _draw_map(result: MapResult) -> str:
    """Draw a map in the colours of the overlays, with the opacity in the fourth channel."""
    rows, columns = result.values.shape
    heat, strength = shade(result.values, (columns, rows), signed=result.method.signed)
    heat.putalpha(Image.fromarray((255 * strength).round().astype(np.uint8)))
    return encode_picture(heat, "PNG")


def _encode_tiles(tiles: Float[np.ndarray, "down across rows columns"]) -> str:
    """Encode maps as tiles of one picture; the colours of each go from 0 to its largest value."""
    largest = np.maximum(tiles.max(axis=(2, 3), keepdims=True), 1e-30)
    cells = np.round(255 * tiles / largest).astype(np.uint8)
    down, across, rows, columns = tiles.shape
    picture = Image.fromarray(cells.swapaxes(1, 2).reshape(down * rows, across * columns))
    picture.putpalette(palette(signed=False).tobytes())
    # low values show the photo
    picture.info["transparency"] = np.linspace(0, _OPACITY, 256).astype(np.uint8).tobytes()
    return encode_picture(picture, "PNG")
